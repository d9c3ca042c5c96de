"""Conversations: `messages` and, where they were offered, `tools`. Chat JSONL of any kind, OpenAI fine-tuning, TRL, and
the layouts that say more beside them: what `millrace export` writes with exact tokens, and verl."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from millrace.formats.episodes.episode import Episode
from millrace.formats.episodes.messages import chat, conversation, offered
from millrace.formats.episodes.rows import BadRow, Content, ImportRow, text_of, time_of
from millrace.formats.layouts.base import (
    REWARDS,
    ImportLayout,
    named,
    rest,
    reward_of,
    split_of,
    status_of,
    task_of,
)
from millrace.schemas import bounds

SPEAKERS = {"human": "user", "gpt": "assistant", "observation": "tool"}
"""who speaks in ShareGPT, where it is not called as in a chat"""


class Chat(ImportLayout):
    """A conversation a row, with each reply of the assistant as a model call."""

    name = "chat"
    help = "conversations (messages, tools), a row an episode: chat JSONL, OpenAI fine-tuning, TRL"
    used: ClassVar[Collection[str]] = (
        "messages",
        "conversations",
        "system",
        "tools",
        "tools_json",
        "split",
        "status",
        *REWARDS,
    )
    """keys that become something other than part of the task"""

    @classmethod
    def fits(cls, content: Mapping[str, Any]) -> bool:
        return "messages" in content or "conversations" in content

    def episodes(self, row: ImportRow) -> Sequence[Episode]:
        """The row's one."""
        content = row.content
        at = time_of(content)
        steps = conversation(_messages(content), offered(content.get("tools") or content.get("tools_json")), at)
        return [
            Episode(
                steps,
                task_id=task_of(content),
                task=rest(content, self.used),
                rewards=self.rewards(content),
                status=status_of(content),
                split=split_of(content),
                agent=text_of(content, "agent"),
                at=at,
                claimed=len(given) if isinstance(given := content.get("tokens"), list) else 0,
            )
        ]

    def rewards(self, content: Content) -> Any:
        """What the row was judged."""
        return reward_of(content)


class Exact(Chat):
    """What `millrace export` writes as jsonl, parquet and hf. Its tokens are left out: nobody here saw them sampled."""

    name = "jsonl"
    help = "the exact layouts of `millrace export` (jsonl, parquet, hf), a lineage a row; its tokens are left out"
    used = (*Chat.used, "tokens", "mask", "logprobs", "versions", "lineage", "sampled_versions", "rewards")

    @classmethod
    def fits(cls, content: Mapping[str, Any]) -> bool:
        return {"tokens", "mask", "lineage"} <= content.keys()

    def rewards(self, content: Content) -> Any:
        given = content.get("rewards")
        parts: dict[str, Any] = {}
        for one in given[: bounds.NAMES] if isinstance(given, list) else ():
            if isinstance(one, Mapping) and one.get("value") is not None:
                parts[str(one.get("source"))] = one["value"]
        return reward_of(content, parts)


class Verl(Chat):
    """What verl trains on, where it holds replies."""

    name = "verl"
    help = "verl rows with messages, a row an episode; the reward is extra_info.reward"

    @classmethod
    def fits(cls, content: Mapping[str, Any]) -> bool:
        return {"messages", "data_source", "reward_model"} <= content.keys()

    used = (*Chat.used, "prompt")

    def episodes(self, row: ImportRow) -> Sequence[Episode]:
        extra = named(row.content.get("extra_info"))
        keys = ("reward", "split", "status", "task_id")
        beside = {name: extra[name] for name in keys if name in extra}
        return super().episodes(ImportRow(row.number, {**beside, **row.content}))


def _messages(content: Content) -> list[Content]:
    """The conversation of a row, in OpenAI's form or as ShareGPT has it."""
    if "messages" in content:
        return chat(content["messages"], "messages")
    turns = content.get("conversations")
    if not isinstance(turns, list):
        raise BadRow("no_messages", "the row has no messages")
    first = [{"role": "system", "content": content["system"]}] if content.get("system") else []
    return chat([*first, *map(_turn, turns)], "conversations")


def _turn(turn: Any) -> Any:
    if not isinstance(turn, Mapping) or "role" in turn:
        return turn
    speaker = str(turn.get("from"))
    return {"role": SPEAKERS.get(speaker, speaker), "content": turn.get("value", "")}
