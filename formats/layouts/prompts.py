"""A prompt and what followed it, in two keys: TRL, and the results of verifiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millrace.formats.episodes.episode import Episode
from millrace.formats.episodes.messages import conversation, offered, said_or_chat
from millrace.formats.episodes.rows import ImportRow, time_of
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
from millrace.schemas.records import EpisodeStatus

USED = ("prompt", "completion", "tools", "tool_defs", "split", "status", *REWARDS)


class Prompt(ImportLayout):
    """Replies in the prompt are context: only those of the completion are the policy's."""

    name = "trl"
    help = "TRL prompt/completion, in messages or text, a row an episode"

    @classmethod
    def fits(cls, content: Mapping[str, Any]) -> bool:
        return {"prompt", "completion"} <= content.keys()

    def episodes(self, row: ImportRow) -> Sequence[Episode]:
        """The row's one."""
        content = row.content
        prompt = said_or_chat(content.get("prompt"), "prompt", "user")
        completion = said_or_chat(content.get("completion"), "completion", "assistant")
        tools = offered(content.get("tools") or content.get("tool_defs"))
        at = time_of(content)
        return [
            Episode(
                conversation([*prompt, *completion], tools, at, len(prompt)),
                task_id=task_of(content),
                task=rest(content, USED),
                rewards=reward_of(content, named(content.get("metrics"))),
                status=self.status(content),
                split=split_of(content),
                at=at,
            )
        ]

    def status(self, content: Mapping[str, Any]) -> EpisodeStatus:
        """How it ended."""
        return status_of(content)


class Verifiers(Prompt):
    """A line of `results.jsonl`."""

    name = "verifiers"
    help = "verifiers results.jsonl, a rollout a row, with its reward and metrics"

    @classmethod
    def fits(cls, content: Mapping[str, Any]) -> bool:
        return {"prompt", "completion", "example_id"} <= content.keys()

    def status(self, content: Mapping[str, Any]) -> EpisodeStatus:
        if content.get("error"):
            return "failed"
        return "truncated" if content.get("is_truncated") else "completed"
