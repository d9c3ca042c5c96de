"""Keys of the log at gateways: who may do what, from when and until when, with the log there and away."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra.config import Settings
from millrace.infra.errors import UnreachableError
from millrace.infra.log.memory.bus import MemoryBus
from millrace.infra.principals import watch as watching
from millrace.infra.principals.book import act_record, mac_of, new_key, outgoing, pepper_name
from millrace.infra.principals.watch import PrincipalWatch, read_book
from millrace.producers.gateway.prices import Prices
from millrace.schemas.ids import now_micros
from tests.support.gateway_world import ScriptedEngine, World, world

USER = {"role": "user", "content": "hi"}
TOPIC, PEPPER, WORKERS = "dev.principals", "p" * 32, "sk-workers"
PATIENCE_S = 20.0


class Keyring:
    """Makes and revokes keys in a log, as `millrace key` does."""

    def __init__(self, folder: Path) -> None:
        self.bus = MemoryBus({TOPIC: 1})
        self.settings = Settings.model_validate({"home": folder / "home", "gateway": {"pepper": PEPPER}})

    def make(self, client: str = "bot", *roles: str, **fields: Any) -> str:
        id, key = new_key()
        record: Any = act_record("grant", id, now_micros(), "test")
        record |= {"client": client, "tenant": "acme", "roles": list(roles or ["agent"]), "mac": mac_of(PEPPER, key)}
        self.write(record | {"pepper": pepper_name(PEPPER)} | fields)
        return key

    def revoke(self, key: str) -> None:
        self.write(act_record("revoke", key[:15], now_micros(), "test"))

    def write(self, record: Any) -> None:
        with self.bus.publisher() as publisher:
            publisher.publish(outgoing(TOPIC, record)).result(5)

    def watch(self) -> PrincipalWatch:
        watch = PrincipalWatch(self.bus, self.settings, "gateway")
        watch.start()
        assert watch.ready.wait(PATIENCE_S)
        return watch


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    return Keyring(tmp_path)


@asynccontextmanager
async def gateway(ring: Keyring, folder: Path, renderer: TemplateRenderer, **options: Any) -> AsyncIterator[World]:
    said = renderer.tokenizer.encode("The answer is 42.<|im_end|>")
    watch = await asyncio.to_thread(ring.watch)
    try:
        options = {"rollout_key": WORKERS, "prices": Prices(1e6, 1e6, 1e6), **options}
        async with world(folder, renderer, ScriptedEngine(lambda *_: said), principals=watch, **options) as w:
            yield w
    finally:
        await asyncio.to_thread(watch.close)


async def code(w: World, key: str) -> str | int:
    """The code of the error that a call gets, 200 without one."""
    got = await w.chat([USER], key)
    return 200 if got.status_code == 200 else got.json()["error"]["code"]


async def until(w: World, key: str, wanted: str | int) -> None:
    """Wait until calls get this."""
    end = time.monotonic() + PATIENCE_S
    while (got := await code(w, key)) != wanted:
        assert time.monotonic() < end, f"{got}, not {wanted}"
        await asyncio.sleep(0.01)


async def test_a_revocation_reaches_every_gateway(ring: Keyring, tmp_path: Path, renderer: TemplateRenderer) -> None:
    key = ring.make()
    one, two = (gateway(ring, tmp_path / name, renderer) for name in "ab")
    async with one as first, two as second:
        assert [await code(w, key) for w in (first, second)] == [200, 200]
        begun = time.monotonic()
        ring.revoke(key)
        await asyncio.gather(*(until(w, key, "key_revoked") for w in (first, second)))
        print(f"refused by both gateways {1000 * (time.monotonic() - begun):.0f} ms after the revocation was written")


async def test_rotation_under_load_refuses_no_call(ring: Keyring, tmp_path: Path, renderer: TemplateRenderer) -> None:
    """16 clients take the newest key before each call; a key is revoked once the next one is known everywhere and the
    calls that bear the former are answered."""
    keys, codes, stop = [ring.make()], list[str | int](), asyncio.Event()
    bearers = dict.fromkeys(range(16), keys[0])

    async def client(w: World, name: int) -> None:
        while not stop.is_set():
            bearers[name] = keys[-1]
            codes.append(await code(w, bearers[name]))
            await asyncio.sleep(0)

    async with gateway(ring, tmp_path, renderer) as w:
        load = [asyncio.create_task(client(w, name)) for name in bearers]
        for _ in range(3):
            later = ring.make()
            await until(w, later, 200)
            keys.append(later)
            while set(bearers.values()) != {later}:
                await asyncio.sleep(0.01)
            ring.revoke(keys[-2])
            await until(w, keys[-2], "key_revoked")
        stop.set()
        await asyncio.gather(*load)
    assert len(codes) >= 16
    assert set(codes) == {200}


async def test_roles_say_what_a_key_may_do(ring: Keyring, tmp_path: Path, renderer: TemplateRenderer) -> None:
    roles = ("owner", "operator", "approver", "auditor", "agent", "worker", "reader")
    keys = {role: ring.make(role, role) for role in roles}
    keys["annotator"] = ring.make("annotator", "annotator", reward_sources=["user", "tests"])
    keys["nobody's"] = ring.make("nobody's", "owner", tenant="*")
    options: dict[str, Any] = {"verifiers": frozenset({"tests"}), "awaits": ("tests",)}
    async with gateway(ring, tmp_path, renderer, **options) as w:
        assert {name for name, key in keys.items() if await code(w, key) == 200} == {"owner", "agent", "worker"}
        w.http.headers["authorization"] = f"Bearer {keys['agent']}"
        session = (await w.http.post("/v1/sessions", json={})).json()
        path = f"/v1/sessions/{session['session']}/reward"

        async def rewards(name: str, source: str) -> int:
            bearer = {"authorization": f"Bearer {keys[name]}"}
            return (await w.http.post(path, json={"source": source, "value": 1.0}, headers=bearer)).status_code

        sources = ("user", "tests", "other")
        assert [await rewards("annotator", source) for source in sources] == [200, 200, 403]
        assert [await rewards("agent", source) for source in sources] == [200, 403, 200]
        assert [await rewards("worker", source) for source in sources] == [200, 200, 200]
        assert {await rewards(name, "user") for name in ("reader", "auditor", "operator", "approver")} == {403}
        starts = {}
        for name, key in keys.items():
            got = await w.http.post("/v1/sessions", json={"ticket": 1}, headers={"authorization": f"Bearer {key}"})
            starts[name] = got.status_code
        assert {name for name, status in starts.items() if status == 200} == {"worker"}
        for name, key in keys.items():
            health = (await w.http.get("/health", headers={"authorization": f"Bearer {key}"})).json()
            assert "policies" in health
            assert ("captured" in health) == (name in ("owner", "operator", "worker", "nobody's"))


async def test_keys_that_are_not_live_are_refused_by_reason(
    ring: Keyring, tmp_path: Path, renderer: TemplateRenderer
) -> None:
    now = now_micros()
    expired, early = ring.make("a", expires=now - 1), ring.make("b", not_before=now + 10**12)
    surplus = [ring.make("c") for _ in range(3)][-1]
    foreign = ring.make("d", pepper="another")
    async with gateway(ring, tmp_path, renderer) as w:
        wrong = surplus[:-64] + "0" * 64
        got = [await code(w, key) for key in (expired, early, surplus, foreign, wrong, new_key()[1], "sk")]
    assert got == ["key_expired", "key_early", "key_surplus", "keys_unread", *["invalid_api_key"] * 3]


async def test_an_open_gateway_closes_with_the_first_key_and_opens_no_more(
    ring: Keyring, tmp_path: Path, renderer: TemplateRenderer
) -> None:
    async with gateway(ring, tmp_path, renderer) as w:
        assert await code(w, "anything") == 200
        key = ring.make()
        await until(w, "anything", "invalid_api_key")
        ring.revoke(key)
        await until(w, key, "key_revoked")
        assert [await code(w, bearer) for bearer in ("anything", WORKERS)] == ["invalid_api_key", 200]


async def test_sessions_belong_to_the_client(ring: Keyring, tmp_path: Path, renderer: TemplateRenderer) -> None:
    first = ring.make()
    async with gateway(ring, tmp_path, renderer) as w:
        w.http.headers["authorization"] = f"Bearer {first}"
        own = (await w.http.post("/v1/sessions", json={})).json()["api_key"]
        second = ring.make()
        ring.revoke(first)
        await until(w, first, "key_revoked")
        assert await code(w, own) == 200
        ring.revoke(second)
        await until(w, own, "key_revoked")


async def test_the_keys_of_a_client_share_a_budget_that_outlives_a_start(
    ring: Keyring, tmp_path: Path, renderer: TemplateRenderer
) -> None:
    terms = {"budget": 1.0, "budget_hours": 1e6}
    first, other = ring.make("bot", **terms), ring.make("cat", **terms)
    async with gateway(ring, tmp_path, renderer) as w:
        assert [await code(w, key) for key in (first, first)] == [200, "budget_spent"]
        second = ring.make("bot", **terms)
        await until(w, second, "budget_spent")
    async with gateway(ring, tmp_path, renderer) as w:
        assert [await code(w, key) for key in (first, second, other)] == ["budget_spent", "budget_spent", 200]


async def test_a_bound_of_requests_holds_for_a_client(
    ring: Keyring, tmp_path: Path, renderer: TemplateRenderer
) -> None:
    key = ring.make(max_rate=1e-9)
    async with gateway(ring, tmp_path, renderer) as w:
        assert [await code(w, key) for _ in range(2)] == [200, "rate_limited"]


async def test_what_the_log_said_is_believed_for_so_long_and_no_longer(
    ring: Keyring, tmp_path: Path, renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = ring.make()
    static = {"keys": {"sk": "acme"}, "key_names": {"sk": "static"}}
    async with gateway(ring, tmp_path, renderer, **static) as w:
        assert await code(w, key) == 200
        monkeypatch.setattr(watching, "TRUST_S", 0.0)
        assert [await code(w, bearer) for bearer in (key, "sk")] == ["keys_unread", 200]


class Away(MemoryBus):
    """A log whose brokers do not answer."""

    def ends(self, topic: str) -> dict[int, int]:
        raise UnreachableError("no broker")


@pytest.mark.parametrize("has_pepper", [True, False])
async def test_a_gateway_that_starts_without_the_log_is_open_only_where_no_key_was_made(
    tmp_path: Path, renderer: TemplateRenderer, has_pepper: bool
) -> None:
    settings = Settings.model_validate({"home": tmp_path / "home", "gateway": {"pepper": PEPPER * has_pepper}})
    watch = PrincipalWatch(Away(), settings, "gateway")
    watch.start()
    said = renderer.tokenizer.encode("The answer is 42.<|im_end|>")
    try:
        async with world(tmp_path, renderer, ScriptedEngine(lambda *_: said), principals=watch) as w:
            assert await code(w, "anything") == ("keys_unread" if has_pepper else 200)
            assert await code(w, new_key()[1]) == "keys_unread"
    finally:
        await asyncio.to_thread(watch.close)


def test_a_use_is_written_once_an_hour_and_brings_nothing_back(ring: Keyring) -> None:
    key = ring.make()
    watch = ring.watch()
    for _ in range(5):
        assert watch.verify(key).standing == "live"
    ring.revoke(key)
    watch.close()
    ring.write(act_record("use", key[:15], now_micros(), "late"))
    book = read_book(ring.bus, "dev")
    assert book.last_use(key[:15]) is not None
    assert book.standing(key[:15], now_micros()) == "revoked"
    acts = [record.key.decode().partition("/")[2] for record in ring.bus.read(TOPIC, 0)]
    assert acts.count("use") == 2


def test_a_topic_that_comes_late_is_followed_and_one_that_goes_takes_nothing_back(ring: Keyring) -> None:
    ring.bus = MemoryBus()
    watch = ring.watch()
    assert not watch.asks_for_keys
    ring.bus.ensure_topics(MemoryBus({TOPIC: 1}).specs.values())  # type: ignore[arg-type]
    key = ring.make()
    try:
        assert any(_again(lambda: watch.verify(key).standing == "live"))
    finally:
        watch.close()


def _again(holds: Callable[[], bool]) -> Iterator[bool]:
    end = time.monotonic() + PATIENCE_S
    for _ in itertools.takewhile(lambda _: time.monotonic() < end, itertools.count()):
        yield holds()
        time.sleep(0.01)
