"""Blocks for clients of a newer protocol: of every type of the engine, wherever the bytes are cut."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.consumers.warehouse.endpoint.faults import QueryError
from millrace.consumers.warehouse.endpoint.native import FRAME_PROTOCOL, INFO, arguments, make_frame
from millrace.consumers.warehouse.endpoint.query import Query, QueryLimits, QueryRunner, varint
from millrace.consumers.warehouse.store.directory import TableDirectory

pytestmark = pytest.mark.slow

LAST = b"\x01b\x06String\x00"
ROW = b"\x04last"

# `n` is the number of the row: values of many lengths, empty ones among them.
OF_TYPES = (
    *("n", "toInt8(n)", "toUInt16(n)", "toInt32(n)", "toInt128(n)", "toUInt256(n)", "toFloat32(n)", "n > 3"),
    *("toString(n)", "repeat('x', n * 50)", "''", "toFixedString('abc', 5)", "toBFloat16(n)"),
    *("today()", "toDate32('2000-01-01')", "now()", "now64(6, 'UTC')", "INTERVAL n DAY", "toIPv4('1.2.3.4')"),
    *("toIPv6('::1')", "generateUUIDv4()", "1.5::Decimal(9, 1)", "1.5::Decimal(18, 1)", "1.5::Decimal(38, 1)"),
    *("1.5::Decimal(76, 1)", "CAST('a (b', 'Enum8(\\'a (b\\' = 1, \\'LowCardinality(\\' = 2)')"),
    *("CAST('x', 'Enum16(\\'x\\' = 1, \\'it\\\\\\'s, ok\\' = 300)')", "NULL", "NULL::Nullable(String)"),
    *("if(n % 2, NULL, toString(n))", "range(n)", "[]", "[NULL]", "arrayMap(x -> toString(x), range(n))"),
    *("arrayMap(x -> range(x), range(n))", "toLowCardinality(toString(n % 5))", "toLowCardinality(toString(n))"),
    *("toLowCardinality(if(n % 2, NULL, toString(n)))", "[toLowCardinality('a')]", "[]::Array(LowCardinality(String))"),
    *("if(n % 2, []::Array(LowCardinality(String)), ['a', 'b'])", "map('a', n, 'b', 2)", "map()::Map(String, UInt8)"),
    *(
        "map('k', range(n))",
        "tuple(n, 'x')",
        "tuple(range(n), toString(n))",
        "tuple()",
        "tuple(1)::Tuple(`a, b` UInt8)",
    ),
    *("(1, [(2, 'x')])::Tuple(a UInt8, b Array(Tuple(c UInt8, `d)` String)))", "map('a', toLowCardinality('b'))"),
    *(
        "tuple(toLowCardinality('b'), toLowCardinality(toUInt64(n)))",
        "[(1, 2)]::Ring",
        "[[(1, 2)]]::Polygon",
        "(1, 2)::Point",
    ),
    *("[[[(1, 2)]]]::MultiPolygon", "[(1, 'x')]::Nested(a UInt8, b String)", "sumSimpleState(n) OVER ()"),
    *("toTime('10:00:00')", "toTime64('10:00:00', 3)"),
)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QueryRunner]:
    with TableDirectory(tmp_path_factory.mktemp("native"), memory_mb=512) as directory:
        yield QueryRunner(directory.handle, QueryLimits())


def blocks(reader: QueryRunner, sql: str, protocol: int) -> bytes:
    """An answer in format Native."""
    return b"".join(reader.ask(Query(sql, form="Native", protocol=protocol)).pieces())


def of_type(value: str, rows: int) -> str:
    """A query with a column of some type and one of a known type behind it."""
    return f"SELECT {value} AS a, 'last' AS b FROM (SELECT number AS n FROM numbers({rows}))"


@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize("value", OF_TYPES)
def test_a_column_of_any_type_ends_where_the_next_begins(reader: QueryRunner, value: str, rows: int) -> None:
    plain = blocks(reader, of_type(value, rows), 0)
    found = blocks(reader, of_type(value, rows), FRAME_PROTOCOL)
    assert found.startswith(INFO + b"\x02" + varint(rows) + b"\x01a")
    assert found.endswith(LAST + ROW * rows), "the byte of the second column stands before its values"
    assert len(found) == len(plain) + len(INFO) + 2


@pytest.mark.parametrize("value", ["n::Variant(UInt64, String)", "n::Dynamic", "sumState(n) OVER ()"])
def test_a_type_whose_length_is_not_told_is_refused_by_name(reader: QueryRunner, value: str) -> None:
    with pytest.raises(QueryError, match=r"not served to this client: write toString") as refused:
        blocks(reader, of_type(value, 2), FRAME_PROTOCOL)
    assert refused.value.code == 48


def test_no_rows_name_their_columns(reader: QueryRunner) -> None:
    found = blocks(reader, "SELECT 1 AS a, 'x' AS b WHERE 0", FRAME_PROTOCOL)
    assert found == INFO + b"\x02\x00\x01a\x05UInt8\x00\x01b\x06String\x00"


def test_older_clients_read_plain_blocks(reader: QueryRunner) -> None:
    assert blocks(reader, "SELECT 1 AS a", FRAME_PROTOCOL - 1) == b"\x01\x01\x01a\x05UInt8\x01"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(0, 4000), max_size=12))
def test_blocks_may_be_cut_anywhere(reader: QueryRunner, cuts: list[int]) -> None:
    sql = "SELECT repeat('x', number) AS a, [toLowCardinality(a), 'y'] AS b, [[number]] AS c FROM numbers(40)"
    plain = blocks(reader, sql, 0) + blocks(reader, "SELECT 1 AS a", 0)
    ends = sorted({0, len(plain), *(cut for cut in cuts if cut < len(plain))})
    pieces = [plain[begin:end] for begin, end in pairwise(ends)]
    assert b"".join(make_frame(iter(pieces))) == b"".join(make_frame(iter([plain])))


def test_a_block_that_never_ends_is_said() -> None:
    with pytest.raises(QueryError, match="cut a block short"):
        list(make_frame(iter([b"\x01\x02\x01a\x05UInt8\x01"])))


def test_arguments_of_types_come_apart() -> None:
    assert arguments("a UInt8, b Map(String, UInt8), `c, d` String") == [
        "a UInt8",
        "b Map(String, UInt8)",
        "`c, d` String",
    ]
    assert arguments("'it\\'s, (' = 1, 'b' = 2") == ["'it\\'s, (' = 1", "'b' = 2"]
    assert arguments("") == []
