"""What a gateway makes of what engines announce: who they are, what they have to do, that they were told to stop."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.infra.engines.kinds import engine_opener
from millrace.infra.errors import ConfigError, EngineUnavailable
from millrace.infra.workers import drain_request
from millrace.producers.gateway.calls import fleet as fleets
from millrace.producers.gateway.calls.fleet import Fleet, UnderWay
from millrace.producers.gateway.calls.routing import RouteWish
from millrace.schemas import codec
from tests.support.gateway_world import ScriptedEngine, status

ONE, TWO = "http://one.test", "http://two.test"
ANY = RouteWish()


def say(fleet: Fleet, version: int | None, url: str = ONE, **fields: Any) -> Any:
    said = {**status(version, url=url), "worker": f"engine-{url}", **fields}
    fleet.observe(said)  # type: ignore[arg-type]
    return said


def best(fleet: Fleet, wish: RouteWish = ANY) -> str | None:
    target = fleet.best(wish)
    return target and target.url


async def test_engines_of_several_kinds_are_known_at_once() -> None:
    opened: list[tuple[str, str]] = []

    def make(url: str, kind: str = "usual") -> ScriptedEngine:
        if kind == "future":
            raise ConfigError("this release speaks with others")
        opened.append((url, kind))
        return ScriptedEngine(lambda *_: [1])

    fleet = Fleet("policy", make, ("http://named.test",))
    say(fleet, 1, ONE, kind="inprocess")
    say(fleet, 1, TWO, kind=None)
    say(fleet, 1, "http://odd.test", kind="future")
    assert opened == [("http://named.test", "usual"), (ONE, "inprocess"), (TWO, "usual")]
    assert set(fleet.targets) == {"http://named.test", ONE, TWO}


def test_a_kind_that_there_is_not_is_refused_by_name() -> None:
    make = engine_opener("inprocess", resubmits=False, key="")
    with pytest.raises(ConfigError, match=r"of kind 'abacus': this release speaks with .*inprocess"):
        make(ONE, kind="abacus")
    assert make(ONE).kind == make(ONE, kind="vllm").kind


def pair() -> Fleet:
    fleet = Fleet("policy", lambda url: ScriptedEngine(lambda *_: [1]))
    for url in (ONE, TWO):
        say(fleet, 1, url)
    return fleet


async def test_the_load_that_others_bring_counts() -> None:
    fleet = pair()
    say(fleet, 1, ONE, running=5, waiting=1)
    assert best(fleet) == TWO
    say(fleet, 1, TWO, running=9)
    assert best(fleet) == ONE
    # What an engine says of this gateway's own calls is not counted twice.
    calls = [UnderWay(ANY) for _ in range(9)]
    for call in calls:
        fleet.begin(fleet.targets[TWO], call)
    say(fleet, 1, TWO, running=9)
    assert (fleet.targets[TWO].other_calls, fleet.targets[TWO].running) == (0, 9)
    for call in calls:
        fleet.end(fleet.targets[TWO], call, 1.0, 10)
    say(fleet, 1, TWO, running=9)
    assert fleet.targets[TWO].other_calls == 0, "they were under way when it looked"
    say(fleet, 1, TWO, running=9)
    assert fleet.targets[TWO].other_calls == 9
    await fleet.close()


async def test_a_slow_engine_says_so() -> None:
    fleet = pair()
    say(fleet, 1, ONE, running=4, tokens_s=10.0)
    say(fleet, 1, TWO, running=8, tokens_s=200.0)
    assert best(fleet) == ONE, "it was idle in a part of that time, for all that is known"
    say(fleet, 1, ONE, running=4, tokens_s=10.0)
    say(fleet, 1, TWO, running=8, tokens_s=200.0)
    assert best(fleet) == TWO
    assert fleet.targets[ONE].token_s == 0.4
    say(fleet, 1, ONE, running=0, tokens_s=10.0)
    assert fleet.targets[ONE].token_s is None


@pytest.mark.parametrize("by", ["its reloader", "a request", "a request before it was known"])
async def test_one_that_was_told_to_stop_gets_no_call(by: str) -> None:
    fleet = pair()
    said = say(fleet, 1, ONE)
    if by == "its reloader":
        say(fleet, 1, ONE, draining=True)
    else:
        if by == "a request before it was known":
            fleet = Fleet("policy", lambda url: ScriptedEngine(lambda *_: [1]))
        request = drain_request("t.workers", said)
        fleet.observe(codec.decode_as("WorkerStatus", request.value or b""))
        for url in (ONE, TWO):
            say(fleet, 1, url)
    for wish in (ANY, RouteWish(former=ONE), RouteWish(has_grant=True), RouteWish(version=1)):
        assert best(fleet, wish) == TWO
    assert best(fleet, RouteWish(failures=(TWO,))) is None
    say(fleet, 2, ONE, draining=True)
    assert fleet.versions == {1}
    say(fleet, 1, ONE, incarnation="another start")
    assert best(fleet, RouteWish(former=ONE)) == ONE


async def test_one_that_is_told_to_go_on_gets_calls_again() -> None:
    fleet = pair()
    engine = say(fleet, 1, ONE)
    for draining in (True, False):
        request = drain_request("t.workers", engine, draining=draining)
        fleet.observe(codec.decode_as("WorkerStatus", request.value or b""))
        assert best(fleet, RouteWish(former=ONE)) == (TWO if draining else ONE)
        say(fleet, 1, ONE, draining=True)  # its reloader did not hear it yet
        assert best(fleet, RouteWish(former=ONE)) == TWO
        say(fleet, 1, ONE)
        assert best(fleet, RouteWish(former=ONE)) == (TWO if draining else ONE)


async def test_one_that_loads_comes_before_one_that_nobody_speaks_of() -> None:
    fleet = Fleet("policy", lambda url: ScriptedEngine(lambda *_: [1]), (TWO,))
    assert best(fleet) == TWO
    say(fleet, None, ONE, state="loading")
    assert fleet.targets[ONE].version is None
    assert best(fleet) == ONE
    assert best(fleet, RouteWish(failures=(ONE,))) == TWO
    say(fleet, None, ONE, state="stopped")
    assert best(fleet) == TWO


async def test_engines_that_left_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = pair()
    say(fleet, 1, ONE, state="stopped")
    monkeypatch.setattr(fleets, "FORGOTTEN_US", -1)
    call = UnderWay(ANY)
    fleet.begin(fleet.targets[ONE], call)
    say(fleet, 1, "http://three.test")
    assert set(fleet.targets) == {ONE, TWO, "http://three.test"}, "it has a call"
    fleet.end(fleet.targets[ONE], call, 1.0, 1)
    say(fleet, 1, "http://four.test")
    assert set(fleet.targets) == {TWO, "http://three.test", "http://four.test"}
    await fleet.close()


async def test_where_all_were_told_to_stop_that_is_said() -> None:
    fleet = pair()
    for url in (ONE, TWO):
        say(fleet, 1, url, draining=True)
    with pytest.raises(EngineUnavailable, match="told to take no new calls"):
        await fleet.route(ANY, 0)
