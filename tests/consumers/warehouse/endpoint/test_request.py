"""What a request asks for, who may send it, and errors in ClickHouse's form."""

import base64
import gzip
import zlib
from pathlib import Path
from typing import Any

import cramjam
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.consumers.warehouse.endpoint.encoding import choose, pack
from millrace.consumers.warehouse.endpoint.faults import QueryError, brief, of_engine
from millrace.consumers.warehouse.endpoint.query import QueryLimits, engine_settings, no_rows, varint
from millrace.consumers.warehouse.endpoint.request import LONGEST, AccessKey, check_caller, read_request
from millrace.infra.config import Settings
from millrace.infra.log.memory.bus import MemoryBus
from millrace.infra.principals.book import ROLES, act_record, mac_of, new_key, pepper_name
from millrace.infra.principals.watch import PrincipalWatch

HERE = {"host": "127.0.0.1:8123"}
UNPACK = {
    "gzip": gzip.decompress,
    "deflate": zlib.decompress,
    "zstd": lambda data: bytes(cramjam.zstd.decompress(data)),
    "lz4": lambda data: bytes(cramjam.lz4.decompress(data)),
    "br": lambda data: bytes(cramjam.brotli.decompress(data)),
}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8123", "[::1]:8123", "127.9.9.9:1"])
def test_loopback_may_ask(host: str) -> None:
    check_caller({"host": host})
    check_caller({"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"})


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "127.0.0.1.evil.example:8123"},
        {},
        {"host": "[::1"},
        {**HERE, "origin": "http://evil.example"},
        {**HERE, "origin": "null"},
        {**HERE, "origin": "http://127.0.0.1:9"},
        {**HERE, "sec-fetch-site": "cross-site"},
    ],
)
def test_other_names_and_other_pages_may_not(headers: dict[str, str]) -> None:
    with pytest.raises(QueryError) as refused:
        check_caller(headers)
    assert refused.value.status in (400, 403)


def basic(user: str, password: str) -> dict[str, str]:
    """Headers of a login."""
    return {"authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


@pytest.mark.parametrize(
    ("headers", "query"),
    [
        (basic("millrace", "k"), {}),
        (basic("default", "k"), {}),
        ({"x-clickhouse-user": "millrace", "x-clickhouse-key": "k"}, {}),
        ({"x-clickhouse-key": "k"}, {}),
        ({"authorization": "Bearer k"}, {}),
        ({}, {"user": "millrace", "password": "k"}),
    ],
)
def test_the_key_is_taken_from_where_clients_put_it(headers: dict[str, str], query: dict[str, str]) -> None:
    AccessKey("k").check(headers, query)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        (basic("millrace", ""), 401),
        (basic("millrace", "K"), 403),
        (basic("root", "k"), 403),
        (basic("millrace", "ключ"), 403),
        ({"authorization": "Basic !!"}, 401),
        ({"authorization": "Bearer"}, 401),
    ],
)
def test_without_the_key_nothing_is_answered(headers: dict[str, str], status: int) -> None:
    with pytest.raises(QueryError) as refused:
        AccessKey("k").check(headers, {})
    assert refused.value.status == status


def test_url_and_body_make_one_query() -> None:
    asks = read_request(
        [("query", "SELECT {a:String},"), ("param_a", "x"), ("max_threads", "2"), ("query_id", "q"), ("database", "d")],
        {**HERE, "accept-encoding": "foo, lz4;q=0, zstd, gzip"},
        b"2",
    )
    assert asks.query.sql == "SELECT {a:String},\n2"
    assert dict(asks.query.params) == {"a": "x"}
    assert dict(asks.query.settings) == {"max_threads": "2"}
    assert (asks.query_id, asks.query.database, asks.encoding) == ("q", "d", "zstd")


def test_headers_name_format_and_database() -> None:
    asks = read_request(
        [("default_format", "CSV")], {"x-clickhouse-format": "JSON", "x-clickhouse-database": "d"}, b"SELECT 1"
    )
    assert (asks.query.form, asks.query.database) == ("JSON", "d")
    assert (
        read_request([("compress", "0"), ("client_protocol_version", "54460")], {}, b"SELECT 1").query.protocol == 54460
    )
    assert read_request([("enable_http_compression", "0")], {"accept-encoding": "gzip"}, b"SELECT 1").encoding == ""


@pytest.mark.parametrize("how", ["gzip", "deflate"])
def test_a_packed_query_is_read(how: str) -> None:
    body = gzip.compress(b"SELECT 1") if how == "gzip" else zlib.compress(b"SELECT 1")
    assert read_request([], {"content-encoding": how}, body).query.sql == "SELECT 1"


@pytest.mark.parametrize(
    ("items", "headers", "body", "code"),
    [
        ([], {}, b"\xff", 36),
        ([], {"content-encoding": "gzip"}, b"no", 36),
        ([], {"content-encoding": "zstd"}, b"SELECT 1", 48),
        ([("decompress", "1")], {}, b"SELECT 1", 48),
        ([("compress", "1")], {}, b"SELECT 1", 48),
        ([("client_protocol_version", "-1")], {}, b"SELECT 1", 36),
        ([("client_protocol_version", "1e3")], {}, b"SELECT 1", 36),
        ([], {"content-type": "multipart/form-data; boundary=x"}, b"SELECT 1", 48),
        ([], {}, b"SELECT '" + b"x" * LONGEST + b"'", 1010),
        ([], {"content-encoding": "gzip"}, gzip.compress(b"x" * (64 << 20)), 1010),
    ],
)
def test_what_cannot_be_served_is_named(
    items: list[tuple[str, str]], headers: dict[str, str], body: bytes, code: int
) -> None:
    with pytest.raises(QueryError) as refused:
        read_request(items, headers, body)
    assert refused.value.code == code


@given(st.lists(st.binary(min_size=1, max_size=2000), max_size=8), st.sampled_from(sorted(UNPACK)))
def test_a_packed_answer_is_the_answer(pieces: list[bytes], how: str) -> None:
    assert UNPACK[how](b"".join(pack(iter(pieces), how))) == b"".join(pieces)


@given(st.text(max_size=40))
def test_only_encodings_that_we_have_are_chosen(accepted: str) -> None:
    assert choose(accepted) in ("", *UNPACK)


@given(
    st.dictionaries(
        st.sampled_from(["max_execution_time", "max_memory_usage", "max_result_rows", "max_block_size"]),
        st.integers(-9, 1 << 70),
    )
)
def test_limits_are_lowered_and_never_raised(asked: dict[str, int]) -> None:
    limits = QueryLimits(seconds=7, memory_bytes=1000, rows=100)
    found = engine_settings({name: str(value) for name, value in asked.items()}, limits)
    for name, most in (
        ("max_execution_time", 7),
        ("max_memory_usage", 1000),
        ("max_result_rows", 100),
        ("max_block_size", 65409),
    ):
        wish = asked.get(name, 0)
        assert int(found[name]) == (min(wish, most) if wish > 0 else most)
    assert found["readonly"] == "1"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("offset", "1"),
        ("max_result_rows", "many"),
        ("format_schema", "/etc/x:y"),
        ("format_template_row", "x"),
        ("allow_introspection_functions", "1"),
        ("user_files_path", "/"),
        ("nonsense", "1"),
        ("output_format_schema", "x"),
        ("additional_table_filters", "{}"),
        ("sql_x", "1"),
    ],
)
def test_other_settings_are_refused(name: str, value: str) -> None:
    with pytest.raises(QueryError):
        engine_settings({name: value}, QueryLimits())


def test_a_client_cannot_undo_readonly() -> None:
    found = engine_settings(
        {"readonly": "0", "use_query_cache": "1", "log_queries": "1", "max_threads": "99"}, QueryLimits(threads=3)
    )
    assert (found["readonly"], found["use_query_cache"], found["max_threads"]) == ("1", "0", "3")


def test_an_engines_error_comes_apart_and_together() -> None:
    text = (
        "Code: 115. DB::Exception: Code: 115. DB::Exception: Unknown setting 'x'. (UNKNOWN_SETTING) "
        "(version 26.9.2.1 (official build)). (UNKNOWN_SETTING)"
    )
    error = of_engine(text)
    assert (error.code, error.name, error.said, error.status) == (115, "UNKNOWN_SETTING", "Unknown setting 'x'.", 404)
    assert of_engine(error.wire("1.2")).said == error.said
    assert error.wire("1.2") == "Code: 115. DB::Exception: Unknown setting 'x'. (UNKNOWN_SETTING) (version 1.2)\n"
    assert of_engine("").code == 1002


def test_the_endpoints_own_queries_are_not_told_of() -> None:
    text = "Code: 62. DB::Exception: Syntax error: failed: In scope SELECT formatQuerySingleLine('x'). (SYNTAX_ERROR)"
    assert of_engine(text).said == "Syntax error: failed."


def test_a_long_list_of_what_was_expected_is_left_out_for_people() -> None:
    error = QueryError("Syntax error: at 1. Expected one of: " + "A, " * 200, 62)
    assert brief(error).said == "Syntax error: at 1."
    assert brief(QueryError("Expected one of: A", 62)).said == "Expected one of: A"


def test_limits_say_which_setting_they_are() -> None:
    assert "query_rows" in of_engine("Code: 396. DB::Exception: Limit. (TOO_MANY_ROWS_OR_BYTES)").said


@given(st.integers(0, 1 << 40))
def test_lengths_are_read_back(value: int) -> None:
    read = sum((byte & 127) << 7 * at for at, byte in enumerate(varint(value)))
    assert read == value


def test_an_empty_native_block_names_its_columns() -> None:
    assert no_rows("a\tUInt64\t\nname\tString\t") == b"\x02\x00\x01a\x06UInt64\x04name\x06String"


READS = {"owner": True, "operator": False, "auditor": False, "reader": False}
"""roles that read the warehouse, and whether one of a single tenant does"""


@pytest.mark.parametrize("tenant", ["acme", "*"])
@pytest.mark.parametrize("role", ROLES)
def test_keys_of_the_log_read_by_role(role: str, tenant: str, tmp_path: Path) -> None:
    settings = Settings.model_validate({"home": tmp_path, "gateway": {"pepper": "p" * 32}})
    watch = PrincipalWatch(MemoryBus({"dev.principals": 1}), settings, "warehouse")
    id, word = new_key()
    proof = {"mac": mac_of("p" * 32, word), "pepper": pepper_name("p" * 32)}
    grant: Any = {**act_record("grant", id, 0, "test"), "client": "c", "tenant": tenant, "roles": [role], **proof}
    watch.book.fold(grant)
    key = AccessKey("k", watch)
    key.check(basic("millrace", "k"), {})
    with pytest.raises(QueryError, match="brokers do not answer"):
        key.check(basic("anybody", word), {})
    watch.start()
    assert watch.ready.wait(20)
    try:
        if role in READS and (READS[role] or tenant == "*"):
            key.check(basic("anybody", word), {})
        else:
            with pytest.raises(QueryError, match="tenants apart" if role in READS else "roles of this key"):
                key.check(basic("anybody", word), {})
        with pytest.raises(QueryError, match="no such key"):
            key.check(basic("anybody", new_key()[1]), {})
        watch.book.fold(act_record("revoke", id, 1, "test"))
        with pytest.raises(QueryError, match="was revoked"):
            key.check(basic("anybody", word), {})
    finally:
        watch.close()
