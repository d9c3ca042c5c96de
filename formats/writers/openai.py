"""Layouts of OpenAI fine-tuning: chats, and pairs of preference, in JSON lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from millrace.dialects.dialogue import Unsayable
from millrace.formats.sample import ExportedSample
from millrace.formats.writers.base import Content, ExportLayout, Turn
from millrace.formats.writers.pairs import paired


class OpenAI(ExportLayout):
    """One row a lineage: its conversation and the tools that were offered."""

    name = "openai"
    help = "OpenAI chat fine-tuning (messages, tools), a lineage a row"

    def rows(self, sample: ExportedSample) -> list[Content]:
        """A row a lineage."""
        return [{"messages": _plain(said.whole), **_offered(said.tools)} for said in sample.conversations().values()]


class OpenAIPreference(ExportLayout):
    """One row a group: input, preferred_output, non_preferred_output."""

    name = "openai-preference"
    help = "OpenAI preference fine-tuning, a group a row: best over worst; one reply each"

    def rows(self, sample: ExportedSample) -> list[Content]:
        """None: a pair needs a group."""
        return []

    def group(
        self, samples: Sequence[ExportedSample], refuse: Turn
    ) -> Iterator[tuple[Sequence[ExportedSample], list[Content]]]:
        """The group's pair, where both outputs are one message of the assistant, as the platform wants them."""
        pair = paired(samples, refuse)
        if pair is None:
            return
        if len(pair.chosen) > 1 or len(pair.rejected) > 1:
            for sample in (pair.best, pair.worst):
                refuse(sample, Unsayable("several_replies", "an output here is one message"))
            return
        row = {
            "input": {"messages": _plain(pair.prompt), **_offered(pair.tools), "parallel_tool_calls": True},
            "preferred_output": _plain(pair.chosen),
            "non_preferred_output": _plain(pair.rejected),
        }
        yield [pair.best, pair.worst], [row]


def _offered(tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"tools": list(tools)} if tools else {}


def _plain(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with the keys that OpenAI knows."""
    return [{name: value for name, value in message.items() if name != "reasoning_content"} for message in messages]
