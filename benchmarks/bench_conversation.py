"""What a conversation costs to keep: `python -m benchmarks.bench_conversation`.

A coding agent with 24 tools and long instructions sends all of its conversation with each call. The named limit is what
is new in its requests, each byte counted once; the printed ratio is what the records of its calls hold of them over
that (1 is the limit), beside the ratio of records that hold each request whole. The other ratio is the time that
shortening the last request takes over that of parsing it as JSON once."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from millrace.producers.gateway.sessions.request_trail import RequestTrail
from millrace.schemas.requests import RequestStore, outline_request

WORDS = [
    "the",
    "file",
    "returns",
    "a",
    "list",
    "of",
    "tokens",
    "when",
    "its",
    "caller",
    "asks",
    "for",
    "more",
    "and",
    "this",
    "test",
    "fails",
    "because",
    "of",
    "that",
]


def prose(draw: random.Random, size: int) -> str:
    """So many bytes of text, roughly."""
    return " ".join(draw.choices(WORDS, k=size // 5))


def requests(turns: int) -> list[bytes]:
    """The requests of a conversation: each call adds what the model said, a tool's result of 1.5 KB and now and then
    a long one."""
    draw = random.Random(turns)
    tools = [
        {"type": "function", "function": {"name": f"tool_{n}", "description": prose(draw, 600), "parameters": {}}}
        for n in range(24)
    ]
    talk: list[Any] = [{"role": "system", "content": prose(draw, 8000)}, {"role": "user", "content": prose(draw, 400)}]
    sent = []
    for turn in range(turns):
        sent.append(json.dumps({"model": "policy", "messages": talk, "tools": tools, "temperature": 1.0}).encode())
        call = {"id": f"call_{turn}", "type": "function", "function": {"name": "tool_1", "arguments": prose(draw, 200)}}
        talk.append({"role": "assistant", "content": prose(draw, 200), "tool_calls": [call]})
        size = 12_000 if turn % 10 == 9 else 1500
        talk.append({"role": "tool", "tool_call_id": call["id"], "content": prose(draw, size)})
    return sent


def stored(trail: RequestTrail, body: bytes) -> bytes:
    """What the record of one more call holds."""
    return trail.compress(body, outline_request(body)).request


def shortened(sent: list[bytes]) -> list[bytes]:
    """What the records of these calls hold of their requests, checked to say all of them."""
    trail, store, kept = RequestTrail(), RequestStore(), []
    for at, body in enumerate(sent):
        outline = outline_request(body)
        left = trail.compress(body, outline)
        trail.add(str(at), outline)
        call = {"request": left.request, "request_base": left.base, "request_kept": left.overlap}
        assert store.add(str(at), call) == body, "what was left out can be put in again"
        kept.append(left.request)
    return kept


def size(bodies: list[bytes], *, packed: bool) -> int:
    """Bytes of all of them, each compressed by itself where they are `packed`."""
    if not packed:
        return sum(map(len, bodies))
    return sum(len(zlib.compress(body, 6)) for body in bodies)


def microseconds(work: Callable[[], object], rounds: int = 30) -> float:
    """The median time of a call."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def main() -> None:
    """A row for each length of conversation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, nargs="+", default=[10, 50, 200], help="calls of each conversation")
    table = Table(
        "calls", "last request", "whole / new", "stored / new", "compressed (zlib)", "us a call", "/ one parse"
    )
    for turns in parser.parse_args().turns:
        sent = requests(turns)
        kept = shortened(sent)
        whole, packed = (size(sent, packed=one) for one in (False, True))
        new_only, both = (size(kept, packed=one) for one in (False, True))
        new = len(sent[-1])
        trail = RequestTrail()
        for at, body in enumerate(sent[:-1]):
            trail.add(str(at), outline_request(body))
        spent = microseconds(partial(stored, trail, sent[-1]))
        parse = microseconds(partial(orjson.loads, sent[-1]))
        table.add_row(
            str(turns),
            f"{new:,} B",
            f"{whole / new:.1f}",
            f"{new_only / new:.2f}",
            f"{packed / both:.1f} times less",
            f"{spent:,.0f}",
            f"{spent / parse:.1f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
