"""A prompt and what followed it, in two keys, as TRL has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millrace.formats.episodes.episode import Episode
from millrace.formats.episodes.messages import conversation, said_or_chat, tool_list
from millrace.formats.episodes.rows import Content, ImportRow, time_of
from millrace.formats.layouts.base import (
    REWARDS,
    ExportLayout,
    ImportLayout,
    mapping_of,
    rest,
    reward_of,
    split_of,
    status_of,
    task_of,
    tools_text,
)
from millrace.formats.sample import ExportedSample
from millrace.schemas.records import EpisodeStatus

USED = ("prompt", "completion", "tools", "tool_defs", "split", "status", *REWARDS)


class PromptReader(ImportLayout):
    """Replies in the prompt are context: only those of the completion are the policy's."""

    name = "trl"
    help = "TRL prompt/completion, in messages or text, a row an episode"

    @classmethod
    def fits(cls, content: Content) -> bool:
        return {"prompt", "completion"} <= content.keys()

    def episodes(self, row: ImportRow) -> Sequence[Episode]:
        """The row's one."""
        content = row.content
        prompt = said_or_chat(content.get("prompt"), "prompt", "user")
        completion = said_or_chat(content.get("completion"), "completion", "assistant")
        tools = tool_list(content.get("tools") or content.get("tool_defs"))
        at = time_of(content)
        return [
            Episode(
                conversation([*prompt, *completion], tools, at, len(prompt)),
                task_id=task_of(content),
                task=rest(content, USED),
                rewards=reward_of(content, mapping_of(content.get("metrics"))),
                status=self.status(content),
                split=split_of(content),
                at=at,
            )
        ]

    def status(self, content: Mapping[str, object]) -> EpisodeStatus:
        """How it ended."""
        return status_of(content)


class PromptWriter(ExportLayout):
    """One row a call: what it was asked, and its reply alone, so that no tool's answer is trained on."""

    name = "trl"
    help = "TRL prompt/completion in messages, a model call a row, for SFTTrainer"

    def rows(self, sample: ExportedSample) -> list[Content]:
        """A row a usable call."""
        return [
            {"prompt": chat.messages, "completion": [chat.reply], "tools": tools_text(chat.tools)}
            for calls in sample.dialogues.values()
            for chat in calls
        ]
