"""Atropos: a `ScoredDataGroup` a group, in JSON lines. It is read where it holds messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from millrace.dialects.dialogue import Unsayable
from millrace.dialects.rendering.base import Message
from millrace.formats.episodes.episode import ClaimedReward, Episode
from millrace.formats.episodes.messages import chat, conversation
from millrace.formats.episodes.rows import BadRow, Content, ImportRow, number_of, text_of
from millrace.formats.layouts.base import ExportLayout, ImportLayout, RefuseSample, rest, split_of
from millrace.formats.sample import ExportedSample, Trace
from millrace.schemas import bounds

USED = ("tokens", "masks", "scores", "inference_logprobs", "ref_logprobs", "advantages", "messages", "overrides")


class AtroposReader(ImportLayout):
    """The members of a group, each with its score. Their tokens are left out."""

    name = "atropos"
    help = "Atropos ScoredDataGroup with messages, a row a group; its tokens are left out"

    @classmethod
    def fits(cls, content: Content) -> bool:
        return {"tokens", "masks", "scores"} <= content.keys()

    def episodes(self, row: ImportRow) -> Sequence[Episode]:
        """One a member."""
        content = row.content
        members, scores = content.get("messages"), content.get("scores")
        if not isinstance(members, list) or not members:
            raise BadRow("no_messages", "the group has no messages, and tokens alone are not imported")
        if not isinstance(scores, list) or len(scores) != len(members):
            raise BadRow("bad_reward", "the group has not one score for each of its messages")
        if len(members) > bounds.GROUP_SIZE:
            raise BadRow("out_of_bounds", f"the group has more than {bounds.GROUP_SIZE:,} members (GROUP_SIZE)")
        overrides, tokens = content.get("overrides"), content.get("tokens")
        extras = overrides if isinstance(overrides, list) and len(overrides) == len(members) else [{}] * len(members)
        ids_of = tokens if isinstance(tokens, list) and len(tokens) == len(members) else [()] * len(members)
        return [
            Episode(
                conversation(chat(messages, f"messages[{at}]"), (), None),
                task_id=text_of(facts, "task_id") if isinstance(facts, Mapping) else "",
                task=rest(content, USED),
                rewards=[ClaimedReward(number_of(score, f"scores[{at}]"))],
                split=split_of(facts) if isinstance(facts, Mapping) else "train",
                exact_tokens=len(ids) if isinstance(ids, list) else 0,
            )
            for at, (messages, score, facts, ids) in enumerate(zip(members, scores, extras, ids_of, strict=True))
        ]


NO_LABEL = -100
"""label of a token that does not train"""
NO_LOGPROB = 1.0
"""stands where no token was sampled; no log-probability is above 0"""


class AtroposWriter(ExportLayout):
    """tokens, masks (the token where it trains, else -100), scores, inference_logprobs, messages: a list a member."""

    name = "atropos"
    help = "Atropos ScoredDataGroup, a group a row: exact tokens, masks as labels, scores, inference_logprobs, messages"
    has_tokens = True

    def group(
        self, samples: Sequence[ExportedSample], refuse: RefuseSample
    ) -> Iterator[tuple[Sequence[ExportedSample], list[Content]]]:
        """The group's row, of those samples that have one trace and a reward."""
        members: list[tuple[ExportedSample, Trace, float]] = []
        for sample in samples:
            try:
                members.append((sample, sample.only_trace(), sample.finite_reward()))
            except Unsayable as error:
                refuse(sample, error)
        if members:
            traces = [trace for _, trace, _ in members]
            row: Content = {
                "tokens": [trace.tokens.tolist() for trace in traces],
                "masks": [np.where(trace.mask != 0, trace.tokens, NO_LABEL).tolist() for trace in traces],
                "scores": [score for _, _, score in members],
                "inference_logprobs": [
                    np.where(trace.mask != 0, trace.logprobs, np.float32(NO_LOGPROB)).tolist() for trace in traces
                ],
                "messages": _messages([sample for sample, _, _ in members]),
                "group_overrides": {"group": members[0][0].record["group"]},
                "overrides": [sample.facts() for sample, _, _ in members],
            }
            yield [sample for sample, _, _ in members], [row]


def _messages(samples: Sequence[ExportedSample]) -> list[list[Message]] | None:
    """The conversation of every member, None where one has none of text."""
    conversations = [next(iter(sample.messages().values()), None) for sample in samples]
    texts = [messages for messages in conversations if messages is not None]
    return texts if len(texts) == len(samples) else None
