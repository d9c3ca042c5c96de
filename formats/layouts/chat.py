"""Conversations: `messages` and, where they were tool_list, `tools`. Read from chat JSONL of any kind; written for the
fine-tuning of OpenAI and of TRL."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from millrace.dialects.rendering.base import Message
from millrace.formats.episodes.episode import ClaimedReward, Episode
from millrace.formats.episodes.messages import chat, conversation, tool_list
from millrace.formats.episodes.rows import BadRow, Content, ImportRow, text_of, time_of
from millrace.formats.layouts.base import (
    REWARDS,
    ExportLayout,
    ImportLayout,
    rest,
    reward_of,
    split_of,
    status_of,
    task_of,
    tools_text,
)
from millrace.formats.sample import ExportedSample
from millrace.schemas.json_values import JsonObject

SPEAKERS = {"human": "user", "gpt": "assistant", "observation": "tool"}
"""who speaks in ShareGPT, where it is not called as in a chat"""


class ChatRowReader(ImportLayout):
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
    def fits(cls, content: Content) -> bool:
        return "messages" in content or "conversations" in content

    def episodes(self, row: ImportRow) -> Sequence[Episode]:
        """The row's one."""
        content = row.content
        at = time_of(content)
        steps = conversation(_messages(content), tool_list(content.get("tools") or content.get("tools_json")), at)
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
                exact_tokens=len(tokens) if isinstance(tokens := content.get("tokens"), list) else 0,
            )
        ]

    def rewards(self, content: Content) -> list[ClaimedReward]:
        """What the row was judged."""
        return reward_of(content)


def _messages(content: Content) -> list[Content]:
    """The conversation of a row, in OpenAI's form or as ShareGPT has it."""
    if "messages" in content:
        return chat(content["messages"], "messages")
    turns = content.get("conversations")
    if not isinstance(turns, list):
        raise BadRow("no_messages", "the row has no messages")
    first = [{"role": "system", "content": content["system"]}] if content.get("system") else []
    return chat([*first, *map(_turn, turns)], "conversations")


def _turn(turn: object) -> object:
    if not isinstance(turn, Mapping) or "role" in turn:
        return turn
    speaker = str(turn.get("from"))
    return {"role": SPEAKERS.get(speaker, speaker), "content": turn.get("value", "")}


class OpenAIWriter(ExportLayout):
    """One row a lineage: its conversation and the tools that were offered."""

    name = "openai"
    help = "OpenAI chat fine-tuning (messages, tools), a lineage a row"

    def rows(self, sample: ExportedSample) -> list[Content]:
        """A row a lineage."""
        return [
            {"messages": without_reasoning(chat.whole), **tools_key(chat.tools)}
            for chat in sample.conversations().values()
        ]


def tools_key(tools: Sequence[Message]) -> JsonObject:
    return {"tools": list(tools)} if tools else {}


def without_reasoning(messages: Sequence[Message]) -> list[Message]:
    """Messages with the keys that OpenAI knows."""
    return [{name: value for name, value in message.items() if name != "reasoning_content"} for message in messages]


class TrlMessagesWriter(ExportLayout):
    """One row a lineage: the conversation as it stood at its end."""

    name = "trl-messages"
    help = "TRL conversations (messages, tools), a lineage a row, for SFTTrainer with assistant_only_loss"

    def rows(self, sample: ExportedSample) -> list[Content]:
        """A row a lineage."""
        return [{"messages": chat.whole, "tools": tools_text(chat.tools)} for chat in sample.conversations().values()]
