"""verifiers: the rows of its `results.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping

from millrace.formats.episodes.rows import Content
from millrace.formats.layouts.base import ExportLayout
from millrace.formats.layouts.prompts import PromptReader
from millrace.formats.sample import ExportedSample, prompt_and_completion
from millrace.schemas.records import EpisodeStatus


class VerifiersReader(PromptReader):
    """A line of `results.jsonl`."""

    name = "verifiers"
    help = "verifiers results.jsonl, a rollout a row, with its reward and metrics"

    @classmethod
    def fits(cls, content: Content) -> bool:
        return {"prompt", "completion", "example_id"} <= content.keys()

    def status(self, content: Mapping[str, object]) -> EpisodeStatus:
        if content.get("error"):
            return "failed"
        return "truncated" if content.get("is_truncated") else "completed"


class VerifiersWriter(ExportLayout):
    """One row a rollout. `example_id` numbers tasks from 0 in the order in which they occur."""

    name = "verifiers"
    help = "verifiers results.jsonl, a rollout a row: prompt, completion, reward, metrics by source, timing"

    def __init__(self) -> None:
        self._examples: dict[str, int] = {}

    def rows(self, sample: ExportedSample) -> list[Content]:
        """The sample's row."""
        lineage, calls = sample.only_lineage()
        record, (prompt, completion) = sample.record, prompt_and_completion(calls)
        latency = sum(call["latency_us"] for call in sample.calls[lineage]) / 1000
        reward = sample.finite_reward()
        metrics = {one["source"]: one["value"] for one in record["rewards"] if one["value"] is not None}
        return [
            {
                "example_id": self._examples.setdefault(record["task_id"], len(self._examples)),
                "task": record["policy"],
                "prompt": prompt,
                "completion": completion,
                "answer": "",
                "info": sample.facts(),
                "reward": reward,
                "metrics": metrics,
                "error": None,
                "is_completed": record["status"] == "completed",
                "is_truncated": record["status"] == "truncated",
                "stop_condition": record["status"],
                "timing": {"generation_ms": latency, "scoring_ms": 0.0, "total_ms": latency},
                "tool_defs": calls[-1].tools or None,
            }
        ]
