"""What a key spends: a fold over the capture log, bounded for each key apart, the same after any restart."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.dialects.answers import bytes_in
from millrace.dialects.errors import ApiError
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra.config import load
from millrace.infra.engines.upstream import TextUpstream
from millrace.infra.errors import ConfigError
from millrace.producers.gateway.prices import Prices
from millrace.producers.gateway.spending import (
    SPENT_HEADER,
    Expense,
    KeyLimits,
    Spending,
    bill_usage,
    expense_of,
    parse_expense,
)
from millrace.producers.gateway.upstreams.routes import RouteRule
from millrace.producers.gateway.upstreams.upstreams import Upstream, Upstreams
from millrace.schemas.ids import now_micros
from tests.support.fake_http import answer, serving, stream
from tests.support.gateway_world import ScriptedEngine, World, world
from tests.support.speakers import SPEAKERS, Speaker
from tests.support.upstream_answers import EVENTS, WHOLE

USER = {"role": "user", "content": "hi"}
KEYS = {"sk-first": "local", "sk-second": "local"}
NAMES = {"sk-first": "first one", "sk-second": "second"}
PRICES = Prices(1e6, 1e6, 1e6)


@asynccontextmanager
async def gateway(
    folder: Path,
    renderer: TemplateRenderer,
    limits: dict[str, KeyLimits],
    *,
    prices: Prices | None = PRICES,
    **more: Any,
) -> AsyncIterator[World]:
    """One of two keys of one tenant."""
    said = renderer.tokenizer.encode("The answer is 42.<|im_end|>")
    engine = ScriptedEngine(lambda *_: said)
    own: dict[str, Any] = {
        "keys": KEYS,
        "key_names": NAMES,
        "limits": {"second": KeyLimits(), **limits},
        "prices": prices,
    }
    async with world(folder, renderer, engine, **own, **more) as w:
        yield w


def refused(got: httpx.Response, code: str, kind: str = "chat") -> None:
    error = got.json()["error"]
    assert got.status_code == 429, got.text
    assert int(got.headers["retry-after"]) >= 1
    if kind == "messages":
        assert (got.json()["type"], error["type"]) == ("error", "rate_limit_error")
    else:
        assert (error["type"], error["code"]) == ("rate_limit_error", code)


def in_log(w: World) -> dict[str, Expense]:
    """The sums over the log by key."""
    out = dict.fromkeys(NAMES.values(), Expense(0, 0.0))
    for kept in w.log.read():
        if SPENT_HEADER in kept.entry.headers:
            key, what = parse_expense(kept.entry.headers[SPENT_HEADER])
            out[key] = Expense(out[key].tokens + what.tokens, out[key].money + what.money)
    return out


def known(w: World) -> dict[str, Expense]:
    return {key: w.gateway.recorder.spending.used(key, 0) for key in NAMES.values()}


async def test_keys_of_one_tenant_share_no_budget(tmp_path: Path, renderer: TemplateRenderer) -> None:
    limits = {"first one": KeyLimits(budget=1.0, budget_hours=1e6)}
    async with gateway(tmp_path, renderer, limits) as w:
        got = await w.chat([USER], "sk-first", n=2)
        assert got.status_code == 200
        usage = got.json()["usage"]
        total = usage["prompt_tokens"] + usage["completion_tokens"]
        assert sum(call["cost"] for call in w.calls()) == total
        assert in_log(w)["first one"] == (total, float(total))
        before = len(w.engine.asked)
        refused(await w.chat([USER], "sk-first"), "budget_spent")
        assert len(w.engine.asked) == before
        assert (await w.chat([USER], "sk-second")).status_code == 200
    async with gateway(tmp_path, renderer, limits) as w:
        refused(await w.chat([USER], "sk-first"), "budget_spent")
        assert (await w.chat([USER], "sk-second")).status_code == 200


async def test_a_session_spends_what_its_starter_may(tmp_path: Path, renderer: TemplateRenderer) -> None:
    limits = {"first one": KeyLimits(tokens_per_minute=1)}
    async with gateway(tmp_path, renderer, limits) as w:
        spending = w.gateway.recorder.spending
        spending._tokens["first one"].length_us = 10**15  # no minute ends during a test
        w.http.headers["authorization"] = "Bearer sk-first"
        session = (await w.http.post("/v1/sessions", json={})).json()
        child = (await w.http.post("/v1/sessions", json={"parent": session["session"]})).json()
        assert (await w.chat([USER], session["api_key"])).status_code == 200
        refused(await w.chat([USER], child["api_key"]), "tokens_per_minute")
        # What is no call goes on.
        path = f"/v1/sessions/{session['session']}/end"
        assert (
            await w.http.post(path, json={}, headers={"authorization": f"Bearer {session['api_key']}"})
        ).status_code == 200
    async with gateway(tmp_path, renderer, {"first one": KeyLimits(budget=1.0, budget_hours=1e6)}) as w:
        refused(await w.chat([USER], child["api_key"]), "budget_spent")


@pytest.mark.parametrize("kind", SPEAKERS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "stream"])
async def test_upstreams_count_in_every_api(
    tmp_path: Path, renderer: TemplateRenderer, kind: type[Speaker], streamed: bool
) -> None:
    """A stream of chat completions whose client asked for no usage counts by its texts, and its record says that nobody
    knows what it cost."""
    uncounted = streamed and kind.name == "chat"
    said = [event for event in EVENTS[kind.name] if not (uncounted and "usage" in event)]
    events = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in said]
    async with serving(stream(*events) if streamed else answer(json.dumps(WHOLE[kind.name]).encode())) as server:
        client = TextUpstream(f"{server.url}/v1", "sk-upstream")
        upstreams = Upstreams(
            [Upstream("far", client, frozenset({kind.name}))], [RouteRule("far", "far", prices=PRICES)]
        )
        limits = {"first one": KeyLimits(budget=1.0, budget_hours=1e6)}
        async with gateway(tmp_path, renderer, limits, upstream=upstreams) as w:
            body = {**kind(w).body("hi"), "model": "far", "stream": streamed}
            headers = {"authorization": "Bearer sk-first"}
            assert (await w.http.post(kind.path, json=body, headers=headers)).status_code == 200
            calls, spent = w.calls(), known(w)["first one"]
            assert known(w) == in_log(w)
            assert spent.money == spent.tokens > 0
            if uncounted:
                assert {call["cost"] for call in calls} == {None}
                assert spent.tokens >= len(calls[0]["request"]) // 4
            else:
                assert sum(call["cost"] for call in calls) == spent.money
            refused(await w.http.post(kind.path, json=body, headers=headers), "budget_spent", kind.name)
            assert len(server.requests) == 1
        await client.close()


async def test_bounds_of_a_key_are_its_own(tmp_path: Path, renderer: TemplateRenderer) -> None:
    limits = {"first one": KeyLimits(max_in_flight=1), "second": KeyLimits(max_rate=1e-9)}
    async with gateway(tmp_path, renderer, limits, max_in_flight=3) as w:
        w.engine.gate = asyncio.Semaphore(0)
        calls = [asyncio.create_task(w.chat([USER], "sk-first")) for _ in range(2)]
        done, running = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        refused(done.pop().result(), "rate_limited")
        w.engine.gate = None
        second = {"authorization": "Bearer sk-second"}
        assert (await w.http.get("/v1/models", headers=second)).status_code == 200
        refused(await w.http.get("/v1/models", headers=second), "rate_limited")
        for call in running:
            call.cancel()


# ---------------------------------------------------------------------- the fold

notes = st.tuples(st.sampled_from(["a", "b", "gone"]), st.integers(0, 1000), st.floats(0, 10), st.integers(0, 9))


@given(st.lists(notes), st.integers(0, 9))
def test_it_is_the_sum_over_the_newest_window(entries: Sequence[tuple[str, int, float, int]], cut: int) -> None:
    hour = 3_600_000_000
    limits = {name: KeyLimits(tokens_per_minute=500, budget=5.0, budget_hours=1.0) for name in ("a", "b")}
    live, at = Spending(limits), 1
    log: list[tuple[dict[str, str], int]] = []
    for key, tokens, money, later in entries:
        at += later * hour // 4
        log.append((Expense(tokens, money).note(key), at))
        live.fold(*log[-1])
        if len(log) % 3 == cut % 3:  # a restart: all of it again
            live = Spending(limits)
            for entry in log:
                live.fold(*entry)
    now = at + cut * hour // 9
    for name in limits:
        mine = [
            (parse_expense(note[SPENT_HEADER])[1], when)
            for note, when in log
            if parse_expense(note[SPENT_HEADER])[0] == name
        ]
        money = 0.0
        for what, when in mine:
            money += what.money if when // hour == now // hour else 0.0
        tokens = sum(what.tokens for what, when in mine if when // 60_000_000 == now // 60_000_000)
        assert live.used(name, now) == (tokens, money)
        if tokens >= 500 or money >= 5.0:
            with pytest.raises(ApiError) as caught:
                live.check(name, now)
            wait = caught.value.retry_after_s
            assert wait is not None
            later = now + wait * 1_000_000
            if caught.value.code == "budget_spent":
                assert live.used(name, later).money == 0.0
            assert live.used(name, later).tokens == 0
        else:
            live.check(name, now)
    live.check("gone", now)


@pytest.mark.parametrize("note", ["", "x", "1 2", "a 1.0 first", "1 b first"])
def test_what_is_no_note_adds_nothing(note: str) -> None:
    spending = Spending({"first": KeyLimits()})
    spending.fold({SPENT_HEADER: note}, now_micros())
    assert spending.used("first", 0) == (0, 0.0)


def test_a_clock_that_goes_back_frees_nothing() -> None:
    spending = Spending({"k": KeyLimits(budget=1.0, budget_hours=1.0)})
    spending.fold(Expense(1, 2.0).note("k"), 10**13)
    with pytest.raises(ApiError, match="budget"):
        spending.check("k", 10**12)


def test_a_budget_lasts_no_longer_than_the_log_that_tells_of_it(tmp_path: Path) -> None:
    file = tmp_path / "millrace.toml"
    file.write_text('[topics]\nshort_hours = 2\n[gateway.keys.k]\nkey = "x"\nbudget = 1\nbudget_hours = 3\n')
    with pytest.raises(ConfigError, match="budget_hours 3 is above"):
        load(file)


def test_what_nobody_counted_counts_by_its_bytes() -> None:
    usage = bill_usage((0, 0, 0), 8, bytes_in([{"text": "\u65e5" * 4, "logprobs": ["none"]}]))
    assert expense_of(None, usage).tokens == 2 + 3
