"""Delegations over A2A, folded: whatever is said, each message has one result at most, and each child one end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.infra.errors import ConfigError
from millrace.producers.intake import jsonrpc
from millrace.producers.intake.a2a import ARTIFACT_BYTES, DelegationExchange, Delegations
from millrace.producers.intake.a2a_proxy import rewrite_card
from millrace.producers.intake.conversation import ChildEvent, Event, Owner

STATES = [
    "submitted",
    "working",
    "completed",
    "failed",
    "rejected",
    "canceled",
    "input-required",
    "auth-required",
    "odd",
]


def read(said: Any) -> jsonrpc.Message:
    return jsonrpc.messages(json.dumps(said).encode())[0]


class Played:
    """Exchanges of one session, each a request and what came for it."""

    def __init__(self) -> None:
        numbers = count()
        self.all = Delegations("helper", lambda: f"call-{next(numbers)}")
        self.exchanges: list[DelegationExchange] = []
        self.told: list[Event | ChildEvent] = []
        self.children = count()

    def ask(self, said: dict[str, Any], *, child: bool) -> None:
        exchange = DelegationExchange(self.all)
        if exchange.begins(read(said)) is not None:
            exchange.give(Owner(f"mr-child{next(self.children)}", "u") if child else None)
        self.exchanges.append(exchange)
        self.told += exchange.from_client(read(said), 0)

    def hear(self, number: int, said: Any) -> None:
        if self.exchanges:
            self.told += self.exchanges[number % len(self.exchanges)].from_server(read(said), 1)

    def leave(self, number: int) -> None:
        if self.exchanges:
            ids: Iterator[Any] = iter([("number", 1)])
            self.told += self.exchanges[number % len(self.exchanges)].broken_off(ids, "error", "{}", 2)

    def own(self, kind: str) -> list[str]:
        return [e["call_id"] for e in self.told if not isinstance(e, ChildEvent) and e["kind"] == kind]


def state_of(word: str, new: bool) -> str:
    return f"TASK_STATE_{word.upper().replace('-', '_')}" if new else word


tasks = st.sampled_from(["t1", "t2"])
status = st.builds(lambda word, new: {"state": state_of(word, new)}, st.sampled_from(STATES), st.booleans())
artifacts = st.builds(lambda name: {"artifactId": name, "parts": [{"text": name}]}, st.sampled_from("ab"))
several = st.lists(artifacts, max_size=2)
pieces = st.one_of(
    st.builds(lambda t, s, a: {"task": {"id": t, "status": s, "artifacts": a}}, tasks, status, several),
    st.builds(lambda t, s: {"kind": "task", "id": t, "status": s}, tasks, status),
    st.builds(lambda t, s: {"id": t, "status": s}, tasks, status),
    st.builds(lambda t, s: {"statusUpdate": {"taskId": t, "status": s}}, tasks, status),
    st.builds(
        lambda t, a, more: {"artifactUpdate": {"taskId": t, "artifact": a, "append": more}},
        tasks,
        artifacts,
        st.booleans(),
    ),
    st.just({"message": {"parts": []}}),
)
answers = st.one_of(
    st.builds(lambda piece: {"jsonrpc": "2.0", "id": 1, "result": piece}, pieces),
    st.just({"jsonrpc": "2.0", "id": 1, "error": {"code": -1}}),
)
sends = st.builds(
    lambda method, task: {"id": 1, "method": method, "params": {"message": {"taskId": task} if task else {}}},
    st.sampled_from(["SendMessage", "message/stream"]),
    st.one_of(st.none(), tasks),
)
follows = st.builds(
    lambda method, task: {"id": 1, "method": method, "params": {"id": task}},
    st.sampled_from(["GetTask", "SubscribeToTask", "tasks/cancel"]),
    tasks,
)
steps = st.one_of(
    st.builds(lambda said, child: lambda p: p.ask(said, child=child), sends, st.booleans()),
    st.builds(lambda said: lambda p: p.ask(said, child=False), follows),
    st.builds(lambda number, said: lambda p: p.hear(number, said), st.integers(0, 7), answers),
    st.builds(lambda number: lambda p: p.leave(number), st.integers(0, 7)),
)


@given(st.lists(steps, max_size=25))
def test_each_message_has_one_result_and_each_child_one_end(did: list[Callable[[Played], None]]) -> None:
    played = Played()
    for step in did:
        step(played)
    calls, results = played.own("tool_call"), played.own("tool_result")
    assert len(set(calls)) == len(calls)
    assert max(Counter(results).values(), default=1) == 1
    assert set(results) <= set(calls)
    ended: set[str] = set()
    for told in played.told:
        if isinstance(told, ChildEvent):
            assert told.owner.key not in ended, "nothing comes behind an end"
            if told.event["kind"] == "end":
                ended.add(told.owner.key)


@given(st.lists(sends, min_size=1, max_size=4))
def test_whoever_hears_nothing_has_an_error_for_a_result(said: list[dict[str, Any]]) -> None:
    played = Played()
    for one in said:
        played.ask(one, child=True)
        played.leave(len(played.exchanges) - 1)
    assert played.own("tool_result") == played.own("tool_call")


NAMES = ["id", "task", "status", "state", "artifacts", "message", "kind", "result"]
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=12,
)


@given(st.lists(anything, max_size=4))
def test_nothing_that_is_said_raises(odd: list[Any]) -> None:
    played = Played()
    played.ask({"id": 1, "method": "SendMessage", "params": {"message": {}}}, child=True)
    for one in odd:
        played.hear(0, {"id": 1, "result": one})
        for method in ("SendMessage", "GetTask"):
            played.ask({"id": 1, "method": method, "params": one}, child=True)
            played.ask({"id": one, "method": method, "params": {"message": one, "id": one}}, child=False)


def test_a_message_that_is_refused_leaves_the_waiting_task_where_it_was() -> None:
    played = Played()
    played.ask({"id": 1, "method": "SendMessage", "params": {"message": {}}}, child=True)
    played.hear(0, {"id": 1, "result": {"task": {"id": "t", "status": {"state": "input-required"}}}})
    for _ in range(2):
        played.ask({"id": 1, "method": "SendMessage", "params": {"message": {"taskId": "t"}}}, child=True)
        played.leave(len(played.exchanges) - 1)
    assert next(played.children) == 1, "one child"
    assert not [1 for told in played.told if isinstance(told, ChildEvent) and told.event["kind"] == "end"]


def artifact_of(name: str, length: int, number: int) -> dict[str, Any]:
    return {"artifactId": name, "parts": [{"text": f"{number}" + "x" * length}]}


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([1, 60_000, 130_000, 300_000]), st.booleans())))
def test_a_result_repeats_the_newest_of_each_artifact_and_counts_what_is_missing(
    updates: list[tuple[str, int, bool]],
) -> None:
    played = Played()
    played.ask({"id": 1, "method": "SendMessage", "params": {"message": {}}}, child=False)
    newest: dict[str, list[dict[str, Any]]] = {}
    largest = 0
    for number, (name, length, more) in enumerate(updates):
        piece = artifact_of(name, length, number)
        newest[name] = [*newest.get(name, []), piece] if more else [piece]
        largest = max(largest, sum(len(json.dumps(one)) for pieces in newest.values() for one in pieces))
        played.hear(0, {"id": 1, "result": {"artifactUpdate": {"taskId": "t", "artifact": piece, "append": more}}})
    played.hear(0, {"id": 1, "result": {"statusUpdate": {"taskId": "t", "status": {"state": "completed"}}}})
    (result,) = (e for e in played.told if not isinstance(e, ChildEvent) and e["kind"] == "tool_result")
    content = json.loads(result["content"])
    repeated, wanted = content["artifacts"], [piece for pieces in newest.values() for piece in pieces]
    assert all(piece in wanted for piece in repeated), "none that was replaced"
    assert sum(len(json.dumps(piece)) for piece in repeated) <= ARTIFACT_BYTES
    missing = [piece for piece in wanted if piece not in repeated]
    assert content.get("left_out", {"bytes": 0})["bytes"] == sum(len(json.dumps(piece)) for piece in missing)
    assert not missing or largest > ARTIFACT_BYTES, "what always fitted is repeated"


# ---------------------------------------------------------------------- cards


def test_a_card_shows_our_addresses_and_no_way_past_them() -> None:
    card = {
        "name": "x",
        "supportedInterfaces": [{"url": "http://localhost:9/rpc?a=1"}, {"url": "https://elsewhere/"}, {"url": "h:1"}],
        "signatures": [{}],
    }
    moved = json.loads(rewrite_card(json.dumps(card).encode(), "http://127.0.0.1:9", "http://127.0.0.1:1/mr-a.b"))
    assert moved == {"name": "x", "supportedInterfaces": [{"url": "http://127.0.0.1:1/mr-a.b/rpc?a=1"}]}


def test_a_card_of_the_older_version() -> None:
    card = {"url": "http://0.0.0.0:9/", "additionalInterfaces": [{"url": "http://[::1]:9/rest", "transport": "REST"}]}
    moved = json.loads(rewrite_card(json.dumps(card).encode(), "http://127.0.0.1:9", "http://a:1"))
    assert moved == {"url": "http://a:1/", "additionalInterfaces": [{"url": "http://a:1/rest", "transport": "REST"}]}


def test_a_card_of_another_server_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"https://public\.example/a2a"):
        rewrite_card(b'{"url": "https://public.example/a2a"}', "http://127.0.0.1:9", "http://a:1")
    with pytest.raises(ValueError, match="a card is"):
        rewrite_card(b"[]", "http://127.0.0.1:9", "http://a:1")
