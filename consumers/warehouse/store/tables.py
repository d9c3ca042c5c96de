"""The tables of `millrace_log`: one a kind of topic, and four of the warehouse's own.

Invariants: every table of records has `topic`, `part`, `off` and `logged` first, which name the place of a record and
when it was written; every record is one row of exactly one table; nothing in a table says how it came there, so a table
that is built again is the same. `blocks` only proves what was done, and is never believed where a table says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from millrace.consumers.warehouse.store.columns import Column, backtick, columns_of, text
from millrace.infra.log.history.kinds import HOLDS, TURNS

LOG, VIEWS = "millrace_log", "millrace"
"""the database of the tables, and that of the views, which is the readers' default"""

PLACE = (
    Column("topic", "LowCardinality(String)", "full name of the topic that the record lies in", value="topic"),
    Column("part", "UInt16", "its partition", value="part"),
    Column("off", "UInt64", "its offset: with topic and part the record's place", "Delta, ZSTD(1)", value="off"),
    Column("logged", "DateTime64(3, 'UTC')", "when its producer wrote it", "Delta, ZSTD(1)", value="logged"),
)
ENGINE = "MergeTree"
DURABLE = {
    "fsync_after_insert": 1,
    "fsync_part_directory": 1,
    "min_rows_to_fsync_after_merge": 1,
    "min_compressed_bytes_to_fsync_after_merge": 1,
    # A window that remembers blocks forgets none that a kill took back: such a block would never come in again.
    "non_replicated_deduplication_window": 0,
}
"""what a kill, or a power cut, must not take"""


@dataclass(frozen=True, slots=True)
class RecordTable:
    """A table of records: `record` names their schema, `order` its sorting key."""

    name: str
    record: str
    order: tuple[str, ...]
    doc: str

    @property
    def columns(self) -> tuple[Column, ...]:
        """All columns, the place first."""
        return _columns(self.record)

    @property
    def full_name(self) -> str:
        return f"{LOG}.{self.name}"

    def create(self) -> str:
        """SQL that makes it where it is not."""
        return create_table(self.name, self.columns, self.order, self.doc, by_month=True)


def create_table(name: str, columns: tuple[Column, ...], order: tuple[str, ...], doc: str, *, by_month: bool) -> str:
    """SQL that makes a table where it is not."""
    definitions = ",\n  ".join(column.definition for column in columns)
    durable = ", ".join(f"{key} = {value}" for key, value in DURABLE.items())
    return (
        f"CREATE TABLE IF NOT EXISTS {LOG}.{name} (\n  {definitions}\n) ENGINE = {ENGINE}"
        f"{' PARTITION BY toYYYYMM(logged)' if by_month else ''} ORDER BY ({', '.join(map(backtick, order))})"
        f" SETTINGS {durable} COMMENT {text(doc)}"
    )


@cache
def _columns(record: str) -> tuple[Column, ...]:
    columns = PLACE + columns_of(record)
    names = [column.name for column in columns]
    assert len(names) == len(set(names)), f"two columns of {record} have one name"
    return columns


_EVENT = ("tenant", "policy", "root_trajectory", "trajectory", "step", "off")
_SAMPLE = ("policy", "v_tail", "group", "sample", "off")
TABLES = (
    RecordTable("raw", "Event", _EVENT, "events as captured, before governance: restricted"),
    RecordTable("events", "Event", _EVENT, "events after governance: the history"),
    RecordTable("trajectories", "Trajectory", _SAMPLE, "sealed, rewarded samples: what learners read"),
    RecordTable("evaluations", "Trajectory", _SAMPLE, "sealed evaluation samples, which never train"),
    RecordTable("completions", "Completion", ("policy", "off"), "what seal said about each group"),
    RecordTable("grants", "Grant", ("policy", "ticket", "round", "off"), "permissions to start a group"),
    RecordTable("prompts", "Prompt", ("policy", "number", "off"), "tasks to roll out"),
    RecordTable("resolutions", "Resolution", ("policy", "off"), "what became of every group and ticket"),
    RecordTable("weights", "WeightVersion", ("policy", "version", "off"), "one row a weight version"),
    RecordTable("ledger", "LedgerEntry", ("policy", "version", "off"), "what trained each version"),
    RecordTable("scores", "Evaluation", ("policy", "tasks", "off"), "what versions came to on held-out tasks"),
    RecordTable("dead_letters", "DeadLetter", ("stage", "reason", "off"), "what could not be processed, and why"),
    RecordTable("decisions", "Decision", ("name", "off"), "what was asked for or decided"),
    RecordTable("principals", "Principal", ("id", "off"), "keys of clients, as far as the log still has them"),
    RecordTable("workers", "WorkerStatus", ("worker", "off"), "statuses of workers, as far as the log still has them"),
    RecordTable("turns", "Turn", ("stage", "slot", "number", "off"), "what each turn of a stage folded"),
    RecordTable("progress", "Progress", ("stage", "slot", "off"), "how far the time of seal's slots has come"),
)
BY_NAME = {table.name: table for table in TABLES}

UNREADABLE = (
    *PLACE,
    Column("reason", "String", "why the record is in no other table"),
    Column("size", "UInt64", "bytes of its value"),
)
BLOCKS = (
    Column("table", "LowCardinality(String)", "table that the block went into"),
    Column("topic", "LowCardinality(String)", "topic that it was read from"),
    Column("part", "UInt16", "its partition"),
    Column("first", "UInt64", "first offset of the range", "Delta, ZSTD(1)"),
    Column("last", "UInt64", "last offset of the range", "Delta, ZSTD(1)"),
    Column("rows", "UInt32", "rows of it"),
    Column("digest", "String", "xxh3_128 of the records' offsets, times and bytes, in hex"),
    Column("written", "DateTime64(3, 'UTC')", "when it had been written", "Delta, ZSTD(1)"),
    Column(
        "tip", "String", "xxh3_128 of the key and bytes of its last record, in hex; empty: an older release wrote it"
    ),
)
"""written after the rows, so it may lack what a kill came before"""

FENCES = (
    Column("topic", "LowCardinality(String)", "topic of the partition"),
    Column("part", "UInt16", "its number"),
    Column("epoch", "UInt64", "rises with every process that takes it over", "Delta, ZSTD(1)"),
    Column("holder", "String", "the newest may write: the process, and which of its tries"),
    Column("taken", "DateTime64(3, 'UTC')", "since when", "Delta, ZSTD(1)"),
)
"""only on a server, where several processes write"""


def own_tables() -> tuple[str, ...]:
    """SQL that makes the tables that are about the warehouse itself."""
    return (
        create_table(
            "unreadable", UNREADABLE, ("topic", "part", "off"), "records that could not be read", by_month=True
        ),
        create_table(
            "blocks", BLOCKS, ("table", "topic", "part", "first"), "what was written, as proof", by_month=False
        ),
        create_table("fences", FENCES, ("topic", "part", "epoch"), "who may bring in which partition", by_month=False),
    )


def table_of(kind: str, record: str) -> RecordTable | None:
    """The table for a record of this name in this kind of topic (`infra.log.history.kinds`); None where it is none of
    what the topic holds."""
    if record not in HOLDS.get(kind, ()):
        return None
    if record == "Progress":
        return BY_NAME["progress"]
    return BY_NAME["turns" if kind in TURNS else kind.replace("-", "_")]


def position_of(kind: str) -> RecordTable:
    """The table whose rows say how far a topic of this kind is in: those of its first record."""
    table = table_of(kind, HOLDS[kind][0])
    assert table is not None, kind
    return table


OWN_POSITION = frozenset(position_of(kind).name for kind in HOLDS)
"""tables that say how far topics are; the others are written before these"""
