"""Where a partition is cut: blocks tile it, keep to their bounds, and come out the same from any block's beginning."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millrace.consumers.warehouse.ingest import blocks as cutting
from millrace.consumers.warehouse.ingest.avro_file import LATEST_MS, millis
from millrace.consumers.warehouse.ingest.blocks import Block, Cutter, month_of
from millrace.infra.log.base import NO_HEADERS, Record

DAY_US = 24 * 3600 * 1_000_000
records = st.lists(
    st.tuples(st.integers(1, 5000), st.integers(-3, 200), st.integers(0, 6 << 20)), min_size=1, max_size=30
).map(
    lambda parts: [
        Record("t", 0, sum(gap for gap, *_ in parts[: at + 1]), b"", b"x" * size, NO_HEADERS, days * DAY_US)
        for at, (_, days, size) in enumerate(parts)
    ]
)


def cut(some: list[Record]) -> list[Block]:
    cutter = Cutter("t", 0)
    found = [block for record in some for block in cutter.add(record)]
    return [*found, *([rest] if (rest := cutter.rest()) else [])]


@given(records)
def test_blocks_tile_a_partition_within_their_bounds(some: list[Record]) -> None:
    blocks = cut(some)
    assert [record for block in blocks for record in block.records] == some
    for block in blocks:
        assert len({record.offset // cutting.SPAN for record in block.records}) == 1
        assert len({month_of(millis(record.timestamp)) for record in block.records}) == 1
        assert block.size - len(block.records[-1].value or b"") < cutting.SIZE
        assert block.size == sum(len(record.value or b"") for record in block.records)


@given(records, st.data())
def test_a_process_that_starts_again_makes_the_same_blocks(some: list[Record], data: st.DataObject) -> None:
    blocks = cut(some)
    done = data.draw(st.integers(0, len(blocks)))
    left = [record for record in some if done == 0 or record.offset >= blocks[done - 1].until]
    assert [block.records for block in cut(left)] == [block.records for block in blocks[done:]]


@given(st.integers(0, LATEST_MS))
def test_a_month_holds_its_moments(moment: int) -> None:
    month = month_of(moment)
    assert moment in month
    assert month_of(month[0]) == month_of(month[-1]) == month
    assert month.start == 0 or month_of(month.start - 1).stop == month.start
