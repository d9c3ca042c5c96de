"""The exact layouts: a lineage a row, with tokens, mask, log-probabilities and versions as they were sealed, beside its
messages. As JSON lines, as Parquet, and as a Hugging Face dataset. Tokens are left out when they are read."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from millrace.formats.episodes.episode import ClaimedReward
from millrace.formats.episodes.rows import Content
from millrace.formats.layouts.base import ExportLayout, reward_of
from millrace.formats.layouts.chat import ChatRowReader
from millrace.formats.sample import ExportedSample
from millrace.schemas import bounds
from millrace.schemas.json_values import JsonObject


class ExactReader(ChatRowReader):
    """What `millrace export` writes as jsonl, parquet and hf. Its tokens are left out: nobody here saw them sampled."""

    name = "jsonl"
    help = "the exact layouts of `millrace export` (jsonl, parquet, hf), a lineage a row; its tokens are left out"
    used = (*ChatRowReader.used, "tokens", "mask", "logprobs", "versions", "lineage", "sampled_versions", "rewards")

    @classmethod
    def fits(cls, content: Content) -> bool:
        return {"tokens", "mask", "lineage"} <= content.keys()

    def rewards(self, content: Content) -> list[ClaimedReward]:
        claims = content.get("rewards")
        parts: JsonObject = {}
        for one in claims[: bounds.NAMES] if isinstance(claims, list) else ():
            if isinstance(one, Mapping) and one.get("value") is not None:
                parts[str(one.get("source"))] = one["value"]
        return reward_of(content, parts)


_TEXT = pa.string()
MESSAGE = pa.struct(
    [
        ("role", _TEXT),
        ("content", _TEXT),
        ("name", _TEXT),
        ("tool_call_id", _TEXT),
        ("reasoning_content", _TEXT),
        (
            "tool_calls",
            pa.list_(
                pa.struct(
                    [
                        ("id", _TEXT),
                        ("type", _TEXT),
                        ("function", pa.struct([("name", _TEXT), ("arguments", _TEXT)])),
                    ]
                )
            ),
        ),
    ]
)
FACTS = [
    ("policy", _TEXT),
    ("tenant", _TEXT),
    ("group", _TEXT),
    ("sample", pa.int32()),
    ("trajectory", _TEXT),
    ("attempt", _TEXT),
    ("task_id", _TEXT),
    ("split", _TEXT),
    ("status", _TEXT),
    ("trained_version", pa.int64()),
]
SCHEMA = pa.schema(
    [
        ("tokens", pa.list_(pa.int32())),
        ("mask", pa.list_(pa.uint8())),
        ("logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
        ("lineage", _TEXT),
        ("sampled_versions", pa.list_(pa.int32())),
        *FACTS,
        ("reward", pa.float64()),
        (
            "rewards",
            pa.list_(
                pa.struct(
                    [
                        ("reward_id", _TEXT),
                        ("source", _TEXT),
                        ("rubric_version", _TEXT),
                        ("value", pa.float64()),
                        ("failure", _TEXT),
                    ]
                )
            ),
        ),
        ("messages", pa.list_(MESSAGE)),
        ("tokenizer_hash", _TEXT),
    ]
)


class ExactWriter(ExportLayout):
    """One JSON object a line."""

    name = "jsonl"
    help = "JSON lines, a lineage a row: exact tokens, mask, logprobs, versions, rewards, messages"
    has_tokens = True

    def rows(self, sample: ExportedSample) -> list[Content]:
        """A row a trace. Its messages are null where its calls were no chat of text."""
        record = sample.record
        messages = sample.messages()
        tokenizer = next(iter(sample.tokenizers)) if len(sample.tokenizers) == 1 else None
        return [
            {
                "tokens": trace.tokens.tolist(),
                "mask": trace.mask.tolist(),
                "logprobs": trace.logprobs.tolist(),
                "versions": trace.versions.tolist(),
                "lineage": trace.id,
                "sampled_versions": trace.sampled_by,
                **sample.facts(),
                "reward": record["reward"],
                "rewards": [dict(reward) for reward in record["rewards"]],
                "messages": messages.get(trace.id),
                "tokenizer_hash": tokenizer,
            }
            for trace in sample.exact()
        ]


class ExactParquetWriter(ExactWriter):
    """The same rows as a Parquet file."""

    name = "parquet"
    help = "Parquet, the rows of jsonl as columns; for pyarrow, pandas, polars, DuckDB, ClickHouse"
    form = "parquet"
    schema = SCHEMA


class ExactDatasetWriter(ExactWriter):
    """The same rows as a directory that `datasets.load_from_disk` reads."""

    name = "hf"
    help = "a Hugging Face dataset directory, the rows of jsonl as columns, for datasets.load_from_disk"
    form = "dataset"
    schema = SCHEMA
