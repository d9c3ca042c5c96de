"""verl: a Parquet file that both of its datasets read. It is read where it holds replies."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from millrace.formats.episodes.episode import Episode
from millrace.formats.episodes.rows import Content, ImportRow
from millrace.formats.layouts.base import ExportLayout, mapping_of, tools_text
from millrace.formats.layouts.chat import ChatRowReader
from millrace.formats.layouts.exact import FACTS, MESSAGE
from millrace.formats.sample import ExportedSample, prompt_and_completion


class VerlReader(ChatRowReader):
    """What verl trains on, where it holds replies."""

    name = "verl"
    help = "verl rows with messages, a row an episode; the reward is extra_info.reward"

    @classmethod
    def fits(cls, content: Content) -> bool:
        return {"messages", "data_source", "reward_model"} <= content.keys()

    used = (*ChatRowReader.used, "prompt")

    def episodes(self, row: ImportRow) -> Sequence[Episode]:
        extra = mapping_of(row.content.get("extra_info"))
        keys = ("reward", "split", "status", "task_id")
        beside = {name: extra[name] for name in keys if name in extra}
        return super().episodes(ImportRow(row.number, {**beside, **row.content}))


class VerlWriter(ExportLayout):
    """One row a lineage: `messages` for its multi-turn SFT dataset; `data_source`, `prompt`, `ability`, `reward_model`
    and `extra_info` for its RL dataset, which asks the prompts again.

    Tools are JSON under a name of our own: verl takes a column `tools` for structures, which have one shape in a file,
    so that each tool would get the parameters of every other; a text, or none, in it ends its SFT dataset."""

    name = "verl"
    help = "verl Parquet, a lineage a row: messages for multi-turn SFT, prompt and reward_model for RL"
    form = "parquet"
    schema = pa.schema(
        [
            ("data_source", pa.string()),
            ("prompt", pa.list_(MESSAGE)),
            ("messages", pa.list_(MESSAGE)),
            ("tools_json", pa.string()),
            ("ability", pa.string()),
            ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
            ("extra_info", pa.struct([("index", pa.int64()), ("reward", pa.float64()), *FACTS])),
        ]
    )

    def __init__(self) -> None:
        self._next = 0

    def rows(self, sample: ExportedSample) -> list[Content]:
        """A row a lineage."""
        out: list[Content] = []
        for calls in sample.dialogues.values():
            prompt, completion = prompt_and_completion(calls)
            extra = {"index": self._next + len(out), "reward": sample.record["reward"], **sample.facts()}
            row: Content = {
                "data_source": sample.record["policy"],
                "prompt": prompt,
                "messages": [*prompt, *completion],
            }
            row |= {"tools_json": tools_text(calls[-1].tools), "ability": "", "extra_info": extra}
            out.append(row | {"reward_model": {"style": "rule", "ground_truth": ""}})
        self._next += len(out)
        return out
