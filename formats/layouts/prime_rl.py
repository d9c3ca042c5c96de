"""The layout of prime-rl: the fields of its `TrainingSample`, one JSON object a lineage."""

from __future__ import annotations

from millrace.formats.episodes.rows import Content
from millrace.formats.layouts.base import ExportLayout
from millrace.formats.sample import ExportedSample


class PrimeRlWriter(ExportLayout):
    """The prompt ends where the policy first sampled; what came between its replies is masked in the completion. The
    advantage is the reward over the mean of its group's exported samples, as GRPO without a scale has it."""

    name = "prime-rl"
    help = "prime-rl TrainingSample fields, a lineage a row: exact tokens, logprobs, advantage within the group"
    has_tokens = True

    def rows(self, sample: ExportedSample) -> list[Content]:
        """A row a trace."""
        advantage = sample.finite_reward() - sample.group_reward
        return [
            {
                "prompt_ids": trace.tokens[: trace.first].tolist(),
                "prompt_mask": [False] * trace.first,
                "completion_ids": trace.tokens[trace.first :].tolist(),
                "completion_mask": [bool(one) for one in trace.mask[trace.first :]],
                "completion_logprobs": trace.logprobs[trace.first :].tolist(),
                "advantage": advantage,
            }
            for trace in sample.exact()
        ]
