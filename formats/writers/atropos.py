"""The layout of Atropos: one `ScoredDataGroup` a group, in JSON lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from millrace.dialects.dialogue import Unsayable
from millrace.formats.sample import ExportedSample, Trace
from millrace.formats.writers.base import Content, ExportLayout, Turn

IGNORED = -100
"""label of a token that does not train"""
NO_LOGPROB = 1.0
"""stands where no token was sampled; no log-probability is above 0"""


class Atropos(ExportLayout):
    """tokens, masks (the token where it trains, else -100), scores, inference_logprobs, messages: a list a member."""

    name = "atropos"
    help = "Atropos ScoredDataGroup, a group a row: exact tokens, masks as labels, scores, inference_logprobs, messages"
    has_tokens = True

    def rows(self, sample: ExportedSample) -> list[Content]:
        """None: a row is a group."""
        return []

    def group(
        self, samples: Sequence[ExportedSample], refuse: Turn
    ) -> Iterator[tuple[Sequence[ExportedSample], list[Content]]]:
        """The group's row, of those samples that have one trace and a reward."""
        members: list[tuple[ExportedSample, Trace, float]] = []
        for sample in samples:
            try:
                members.append((sample, sample.only_trace(), sample.judged()))
            except Unsayable as error:
                refuse(sample, error)
        if members:
            traces = [trace for _, trace, _ in members]
            row: Content = {
                "tokens": [trace.tokens.tolist() for trace in traces],
                "masks": [np.where(trace.mask != 0, trace.tokens, IGNORED).tolist() for trace in traces],
                "scores": [score for _, _, score in members],
                "inference_logprobs": [
                    np.where(trace.mask != 0, trace.logprobs, np.float32(NO_LOGPROB)).tolist() for trace in traces
                ],
                "messages": _messages([sample for sample, _, _ in members]),
                "group_overrides": {"group": members[0][0].record["group"]},
                "overrides": [sample.facts() for sample, _, _ in members],
            }
            yield [sample for sample, _, _ in members], [row]


def _messages(samples: Sequence[ExportedSample]) -> list[list[Content]] | None:
    """The conversation of every member, None where one has none of text."""
    conversations = [next(iter(sample.messages().values()), None) for sample in samples]
    texts = [messages for messages in conversations if messages is not None]
    return texts if len(texts) == len(samples) else None
