"""Layouts of TRL: prompt and completion, whole conversations, pairs of preference. Datasets in JSON lines, which
`datasets.load_dataset("json")` and so every trainer of TRL reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from millrace.formats.sample import ExportedSample
from millrace.formats.writers.base import Content, ExportLayout, Turn
from millrace.formats.writers.pairs import paired


class Trl(ExportLayout):
    """One row a call: what it was asked, and its reply alone, so that no tool's answer is trained on."""

    name = "trl"
    help = "TRL prompt/completion in messages, a model call a row, for SFTTrainer"

    def rows(self, sample: ExportedSample) -> list[Content]:
        """A row a usable call."""
        return [
            {"prompt": said.messages, "completion": [said.reply], "tools": offered(said.tools)}
            for calls in sample.dialogues.values()
            for said in calls
        ]


class TrlMessages(ExportLayout):
    """One row a lineage: the conversation as it stood at its end."""

    name = "trl-messages"
    help = "TRL conversations (messages, tools), a lineage a row, for SFTTrainer with assistant_only_loss"

    def rows(self, sample: ExportedSample) -> list[Content]:
        """A row a lineage."""
        return [{"messages": said.whole, "tools": offered(said.tools)} for said in sample.conversations().values()]


class TrlPreference(ExportLayout):
    """One row a group: the reply with the highest reward over the one with the lowest."""

    name = "trl-preference"
    help = "TRL preference (prompt, chosen, rejected), a group a row: best over worst, for DPOTrainer"

    def rows(self, sample: ExportedSample) -> list[Content]:
        """None: a pair needs a group."""
        return []

    def group(
        self, samples: Sequence[ExportedSample], refuse: Turn
    ) -> Iterator[tuple[Sequence[ExportedSample], list[Content]]]:
        """The group's pair."""
        pair = paired(samples, refuse)
        if pair is not None:
            row = {"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected}
            scores = {"score_chosen": pair.best.judged(), "score_rejected": pair.worst.judged()}
            yield [pair.best, pair.worst], [row | scores | {"tools": offered(pair.tools)}]


def offered(tools: Sequence[dict[str, Any]]) -> str | None:
    """Tools as JSON, which TRL takes and whose columns never clash; null where there are none."""
    return json.dumps(tools) if tools else None
