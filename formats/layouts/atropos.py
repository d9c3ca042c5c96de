"""Atropos: a `ScoredDataGroup` a row, where it holds messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millrace.formats.episodes.episode import ClaimedReward, Episode
from millrace.formats.episodes.messages import chat, conversation
from millrace.formats.episodes.rows import BadRow, ImportRow, number_of, text_of
from millrace.formats.layouts.base import ImportLayout, rest, split_of
from millrace.schemas import bounds

USED = ("tokens", "masks", "scores", "inference_logprobs", "ref_logprobs", "advantages", "messages", "overrides")


class Atropos(ImportLayout):
    """The members of a group, each with its score. Their tokens are left out."""

    name = "atropos"
    help = "Atropos ScoredDataGroup with messages, a row a group; its tokens are left out"

    @classmethod
    def fits(cls, content: Mapping[str, Any]) -> bool:
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
        said = overrides if isinstance(overrides, list) and len(overrides) == len(members) else [{}] * len(members)
        known = tokens if isinstance(tokens, list) and len(tokens) == len(members) else [()] * len(members)
        return [
            Episode(
                conversation(chat(messages, f"messages[{at}]"), (), None),
                task_id=text_of(facts, "task_id") if isinstance(facts, Mapping) else "",
                task=rest(content, USED),
                rewards=[ClaimedReward(number_of(score, f"scores[{at}]"))],
                split=split_of(facts) if isinstance(facts, Mapping) else "train",
                claimed=len(ids) if isinstance(ids, list) else 0,
            )
            for at, (messages, score, facts, ids) in enumerate(zip(members, scores, said, known, strict=True))
        ]
