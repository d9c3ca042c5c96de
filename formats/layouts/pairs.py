"""Two answers to one prompt, of which one was preferred: TRL and OpenAI. A row is a group of two episodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from millrace.formats.episodes.episode import ClaimedReward, Episode
from millrace.formats.episodes.messages import chat, conversation, offered, said_or_chat
from millrace.formats.episodes.rows import BadRow, Content, ImportRow, number_of, time_of
from millrace.formats.layouts.base import ImportLayout, rest, split_of, task_of

PREFERRED, OTHER = 1.0, 0.0
"""rewards where a row gives no scores"""


class Preference(ImportLayout):
    """`chosen` over `rejected`, behind `prompt` or each with the prompt in it."""

    name = "trl-preference"
    help = "TRL preference (prompt, chosen, rejected), a row a group of two; rewards 1 and 0 where no scores are given"
    used: ClassVar[Collection[str]] = (
        "prompt",
        "chosen",
        "rejected",
        "tools",
        "score_chosen",
        "score_rejected",
        "split",
    )

    @classmethod
    def fits(cls, content: Mapping[str, Any]) -> bool:
        return {"chosen", "rejected"} <= content.keys()

    def episodes(self, row: ImportRow) -> Sequence[Episode]:
        """The chosen one, then the other."""
        content = row.content
        chosen, rejected = (said_or_chat(content.get(name), name, "assistant") for name in ("chosen", "rejected"))
        if content.get("prompt"):
            prompt = said_or_chat(content["prompt"], "prompt", "user")
        else:
            shared = sum(1 for _ in _same(chosen, rejected))
            prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        scores = [
            number_of(content.get(name, value), name)
            for name, value in (("score_chosen", PREFERRED), ("score_rejected", OTHER))
        ]
        return self._pair(content, prompt, (chosen, rejected), scores, offered(content.get("tools")))

    def _pair(
        self,
        content: Content,
        prompt: list[Content],
        answers: tuple[list[Content], list[Content]],
        scores: Sequence[float],
        tools: list[Content],
    ) -> list[Episode]:
        at = time_of(content)
        return [
            Episode(
                conversation([*prompt, *answer], tools, at, len(prompt)),
                task_id=task_of(content),
                task=rest(content, self.used),
                rewards=[ClaimedReward(score, label=label)],
                split=split_of(content),
                at=at,
            )
            for answer, score, label in zip(answers, scores, ("chosen", "rejected"), strict=True)
        ]


class OpenAIPreference(Preference):
    """The same in OpenAI's words."""

    name = "openai-preference"
    help = "OpenAI preference (input, preferred_output, non_preferred_output), a row a group of two; rewards 1 and 0"
    used = ("input", "preferred_output", "non_preferred_output", "split")

    @classmethod
    def fits(cls, content: Mapping[str, Any]) -> bool:
        return {"input", "preferred_output"} <= content.keys()

    def episodes(self, row: ImportRow) -> Sequence[Episode]:
        content = row.content
        asked = content.get("input")
        if not isinstance(asked, Mapping):
            raise BadRow("no_messages", "input is no object with messages")
        prompt = chat(asked.get("messages"), "input.messages")
        one, other = (chat(content.get(name), name) for name in ("preferred_output", "non_preferred_output"))
        return self._pair(content, prompt, (one, other), (PREFERRED, OTHER), offered(asked.get("tools")))


def _same(one: list[Content], other: list[Content]) -> Any:
    """The messages that both begin with."""
    for left, right in zip(one, other, strict=False):
        if left != right:
            return
        yield left
