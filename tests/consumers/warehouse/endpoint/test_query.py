"""A query is bounded in time, memory and rows, comes in pieces where it may, and leaves nothing behind; ingest goes on
beside readers."""

import threading
from collections.abc import Iterator

import pytest

from millrace.consumers.warehouse.endpoint.faults import QueryError
from millrace.consumers.warehouse.endpoint.query import Query, QueryLimits, QueryRunner
from millrace.consumers.warehouse.store.directory import TableDirectory
from tests.support.asked_tables import ROWS, asked_tables

pytestmark = pytest.mark.slow

READERS = 8
BLOCKS = 40
BLOCK = 1000


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TableDirectory]:
    with asked_tables(tmp_path_factory.mktemp("read")) as found:
        yield found


def answer(reader: QueryRunner, sql: str, **how: str) -> bytes:
    """All bytes of an answer."""
    return b"".join(reader.ask(Query(sql, **how)).pieces())


@pytest.mark.parametrize(
    ("limits", "sql", "name"),
    [
        (
            QueryLimits(seconds=1),
            "SELECT count() FROM numbers(100000000000000) WHERE sipHash64(number) = 1",
            "TIMEOUT_EXCEEDED",
        ),
        (
            QueryLimits(memory_bytes=64 << 20),
            "SELECT length(groupArray(number)) FROM numbers(1000000000)",
            "MEMORY_LIMIT_EXCEEDED",
        ),
        (QueryLimits(memory_bytes=64 << 20), "SELECT range(1000000) FROM numbers(1000)", "MEMORY_LIMIT_EXCEEDED"),
        (QueryLimits(rows=1000), "SELECT number FROM numbers(1001)", "TOO_MANY_ROWS_OR_BYTES"),
        (QueryLimits(rows=1000), "SELECT number FROM numbers(1001) FORMAT JSON", "TOO_MANY_ROWS_OR_BYTES"),
    ],
)
def test_a_query_is_bounded(directory: TableDirectory, limits: QueryLimits, sql: str, name: str) -> None:
    reader = QueryRunner(directory.handle, limits)
    with pytest.raises(QueryError) as refused:
        answer(reader, sql)
    assert refused.value.name == name
    assert "[warehouse] query_" in refused.value.said, "it says which setting it is"
    assert answer(reader, "SELECT 1") == b"1\n"


def test_a_large_answer_comes_in_pieces_and_whole(directory: TableDirectory) -> None:
    reader = QueryRunner(directory.handle, QueryLimits())
    pieces = list(reader.ask(Query("SELECT off FROM steps ORDER BY off")).pieces())
    assert len(pieces) > 1
    expected = b"".join(b"%d\n" % number for number in range(ROWS))
    assert b"".join(pieces) == expected
    whole = list(reader.ask(Query("SELECT off FROM steps ORDER BY off", is_whole=True)).pieces())
    assert whole == [expected]


def test_an_answer_that_nobody_takes_ends_its_query(directory: TableDirectory) -> None:
    reader = QueryRunner(directory.handle, QueryLimits())
    found = reader.ask(Query("SELECT number FROM numbers(5000000)"))
    assert next(found.pieces())
    found.close()
    found.close()
    running = "SELECT count() FROM system.processes WHERE query LIKE '%numbers(5000000)%' AND query NOT LIKE '%LIKE%'"
    assert directory.rows(running) == [(0,)]


def test_queries_see_nothing_of_each_other(directory: TableDirectory) -> None:
    reader = QueryRunner(directory.handle, QueryLimits())
    asked = Query(
        "SELECT timezone(), getSetting('max_threads')", settings={"max_threads": "1"}, database="millrace_log"
    )
    assert b"".join(reader.ask(asked).pieces()).endswith(b"\t1\n")
    assert (
        answer(reader, "SELECT if(getSetting('max_threads') = 1, 'theirs', 'its own'), currentDatabase()")
        == b"its own\tmillrace\n"
    )


def test_an_unknown_database_is_named(directory: TableDirectory) -> None:
    with pytest.raises(QueryError, match="database others is not served"):
        answer(QueryRunner(directory.handle, QueryLimits()), "SELECT 1", database="others")


def test_an_empty_answer_names_its_columns(directory: TableDirectory) -> None:
    reader = QueryRunner(directory.handle, QueryLimits())
    assert (
        answer(reader, "SELECT off, name FROM steps WHERE 0", form="Native")
        == b"\x02\x00\x03off\x06UInt64\x04name\x06String"
    )


def test_ingest_goes_on_under_eight_readers(directory: TableDirectory) -> None:
    """Blocks come in one after another, and each reader sees whole blocks alone, more and more of them."""
    directory.run("CREATE TABLE millrace_log.growing (block UInt32, row UInt32) ENGINE = MergeTree ORDER BY block")
    reader = QueryRunner(directory.handle, QueryLimits())
    done, faults, asked = threading.Event(), [], [0] * READERS

    def write() -> None:
        try:
            for block in range(BLOCKS):
                directory.run(f"INSERT INTO millrace_log.growing SELECT {block}, number FROM numbers({BLOCK})")
        except Exception as error:
            faults.append(error)
        finally:
            done.set()

    def read(which: int) -> None:
        before = 0
        try:
            while not done.is_set() or asked[which] == 0:
                text = answer(reader, "SELECT count(), uniqExact(block), max(block) FROM millrace_log.growing").decode()
                rows, blocks, last = map(int, text.split())
                assert rows == blocks * BLOCK
                assert rows >= before
                assert not rows or last == blocks - 1
                before, asked[which] = rows, asked[which] + 1
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=write), *(threading.Thread(target=read, args=(at,)) for at in range(READERS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert all(asked)
    assert directory.rows("SELECT count(), uniqExact(block) FROM millrace_log.growing") == [(BLOCKS * BLOCK, BLOCKS)]
