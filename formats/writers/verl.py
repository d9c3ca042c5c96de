"""The layout of verl: one Parquet file that both of its datasets read."""

from __future__ import annotations

import pyarrow as pa

from millrace.dialects.dialogue import Unsayable
from millrace.formats.sample import ExportedSample
from millrace.formats.writers.base import Content, ExportLayout
from millrace.formats.writers.exact import FACTS, MESSAGE
from millrace.formats.writers.trl import offered


class Verl(ExportLayout):
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
            prompt, whole = calls[0].messages, calls[-1].whole
            if whole[: len(prompt)] != prompt:
                raise Unsayable("rewritten", "its agent rewrote what it had asked first")
            extra = {"index": self._next + len(out), "reward": sample.record["reward"], **sample.facts()}
            row: Content = {"data_source": sample.record["policy"], "prompt": prompt, "messages": whole}
            row |= {"tools_json": offered(calls[-1].tools), "ability": "", "extra_info": extra}
            out.append(row | {"reward_model": {"style": "rule", "ground_truth": ""}})
        self._next += len(out)
        return out
