"""Whatever an upstream answers is read up to a bound, and leaves nothing for the next call."""

from __future__ import annotations

import asyncio
import gzip
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.infra.engines.upstream import Longest, TextUpstream, header_value
from millrace.infra.errors import EngineUnavailable
from tests.support.fake_http import Script, answer, serving

LONGEST = Longest(300_000, 100_000)


def said(head: bytes, parts: Sequence[bytes], status: int = 200, *, endless: bool = False) -> Script:
    """An answer that ends with its connection, or never."""

    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 %d X\r\nconnection: close\r\n%s\r\n" % (status, head))
        while True:
            for part in parts:
                writer.write(part)
                await writer.drain()
            if not endless:
                break
        writer.close()

    return script


@pytest.mark.parametrize(("status", "longest"), [(200, LONGEST.reply), (201, LONGEST.reply), (400, LONGEST.refusal)])
async def test_an_answer_has_a_bound(status: int, longest: int) -> None:
    scripts = [answer(b"x" * longest, status), answer(b"x" * (longest + 1), status)]
    async with serving(*scripts, said(b"", [b"x" * 9999], status, endless=True)) as fake:
        upstream = TextUpstream(fake.url, longest=LONGEST)
        assert len((await upstream.ask("/", b"")).body) == longest
        for _ in range(2):
            with pytest.raises(EngineUnavailable, match=f"more than {longest} bytes") as failed:
                await upstream.ask("/", b"")
            assert failed.value.status == status
        async with await upstream.stream("/", b"") as endless:
            with pytest.raises(EngineUnavailable):
                await endless.read_all()
        await upstream.close()


async def test_what_is_compressed_grows_no_further_than_the_bound() -> None:
    packed = gzip.compress(bytes(100 << 20), 1)
    async with serving(said(b"content-encoding: gzip\r\n", [packed])) as fake:
        upstream = TextUpstream(fake.url, longest=LONGEST)
        tracemalloc.start()
        try:
            with pytest.raises(EngineUnavailable, match="more than"):
                await upstream.ask("/", b"")
            assert tracemalloc.get_traced_memory()[1] < 10 << 20
        finally:
            tracemalloc.stop()
            await upstream.close()


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd", "br", "none"])
async def test_what_is_not_compressed_as_it_says_is_no_answer(encoding: str) -> None:
    async with serving(said(f"content-encoding: {encoding}\r\n".encode(), [b"plain"])) as fake:
        upstream = TextUpstream(fake.url)
        try:
            assert (await upstream.ask("/", b"")).body == b"plain"
        except EngineUnavailable:
            assert encoding != "none"
        await upstream.close()


@given(st.binary())
def test_a_header_passes_byte_for_byte_or_not_at_all(value: bytes) -> None:
    sent = header_value(value.decode(errors="surrogateescape"))
    control = any((byte < 0x20 and byte != 0x09) or byte == 0x7F for byte in value)
    assert sent is None if control else sent is not None and sent.encode("latin-1") == value


async def test_headers_that_are_no_latin_1_do_not_cost_the_answer() -> None:
    head = "openai-organization: Bäckerei\r\nx-request-id: \u65e5\u672c\r\n".encode() + b"request-id: \xff\r\n"
    async with serving(said(head, [b"{}"])) as fake:
        upstream = TextUpstream(fake.url)
        found = await upstream.ask("/", b"")
        await upstream.close()
    assert found.body == b"{}"
    raw = {name: text.encode("latin-1") for name, text in found.headers.items()}
    assert raw == {
        "openai-organization": "Bäckerei".encode(),
        "x-request-id": "\u65e5\u672c".encode(),
        "request-id": b"\xff",
    }


async def test_a_cookie_stays_with_its_call() -> None:
    async with serving(said(b"set-cookie: sid=1; Path=/\r\nset-cookie: b=2\r\n", [b"{}"])) as fake:
        # An address has no cookies of its own: a name has.
        upstream = TextUpstream(fake.url.replace("127.0.0.1", "localhost"))
        for _ in range(2):
            assert (await upstream.ask("/", b"")).body == b"{}"
        await upstream.close()
        assert len(fake.requests) == 2
        assert all("cookie" not in head.lower() for head, _ in fake.requests)


@pytest.mark.parametrize("status", [101, 199])
async def test_an_answer_that_is_none_is_an_error(status: int) -> None:
    async with serving(said(b"upgrade: x\r\n", [], status)) as fake:
        upstream = TextUpstream(fake.url)
        with pytest.raises(EngineUnavailable):
            await upstream.ask("/", b"")
        await upstream.close()
