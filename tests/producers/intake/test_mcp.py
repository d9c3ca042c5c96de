"""The fold of a conversation into events: laws over any interleaving, and each way a call may end."""

from __future__ import annotations

import itertools
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from millrace.producers.intake.jsonrpc import messages
from millrace.producers.intake.mcp import Conversation, Event, ParkedCalls
from millrace.schemas import bounds

IDS: list[Any] = [1, 1.5, "1", "a", None, True, [1], {"a": 1}]


class Talk:
    """A conversation whose clock is the number of messages."""

    def __init__(self, parked: ParkedCalls | None = None) -> None:
        numbers = itertools.count()
        self.fold = Conversation("calc", lambda: f"mcp-{next(numbers)}", parked)
        self.events: list[Event] = []
        self.now = 0

    def sent(self, *said: Any) -> Talk:
        return self._take(said, self.fold.from_client)

    def received(self, *said: Any) -> Talk:
        return self._take(said, self.fold.from_server)

    def _take(self, said: tuple[Any, ...], fold: Any) -> Talk:
        for one in said:
            for message in messages(json.dumps(one).encode()):
                self.now += 1
                self.events += fold(message, self.now)
        return self

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["kind"] == kind]


def call(id: Any, name: str = "add", **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": {"name": name, **params}}


def answer(id: Any, **result: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "result": result or {"content": []}}


def cancel(id: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": id, "reason": "enough"}}


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60), st.booleans(), st.randoms())
def test_every_call_that_got_its_result_is_one_pair(steps: list[tuple[bool, int]], batched: bool, random: Any) -> None:
    """A client that keeps to the protocol: answers come in any order, among everything else that may pass."""
    talk, ids = Talk(), iter(random.sample(range(1000), 1000))
    waiting: list[Any] = []
    done: dict[str, str] = {}
    asked = 0
    for again, pick in steps:
        if pick < 5 or not waiting:
            id = random.choice([next(ids), str(next(ids))])
            known = random.random() < 0.8
            request = call(id, arguments={"n": id}) if known else {**call(id), "method": "resources/read"}
            noise = {"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progressToken": id}}
            talk.sent([request, noise] if batched else request)
            waiting.append((id, known))
            asked += known
        else:
            id, known = waiting.pop(pick % len(waiting))
            talk.received({"jsonrpc": "2.0", "id": id, "method": "sampling/createMessage", "params": {}})
            talk.sent(answer(id, role="assistant"))
            talk.received(answer(id, content=[{"type": "text", "text": str(id)}]))
            if again:
                talk.received(answer(id, content=[]))
            if known:
                done[json.dumps({"n": id})] = str(id)
    calls, results = talk.of("tool_call"), talk.of("tool_result")
    assert len(calls) == asked
    arguments = {event["call_id"]: event["arguments"] for event in calls}
    assert len(arguments) == asked
    said = {arguments[event["call_id"]]: json.loads(event["content"])["content"][0]["text"] for event in results}
    assert said == done
    assert len(results) == len(done)
    for event in results:
        begun = next(one for one in calls if one["call_id"] == event["call_id"])
        assert event["latency_us"] == event["event_time"] - begun["event_time"] > 0


MESSAGES = st.one_of(
    st.builds(call, st.sampled_from(IDS), st.sampled_from(["add", 7, None])),
    st.builds(answer, st.sampled_from(IDS)),
    st.builds(cancel, st.sampled_from(IDS)),
    st.builds(lambda id: {"id": id, "error": {"code": -1, "message": "no"}}, st.sampled_from(IDS)),
    st.builds(
        lambda id, method: {"id": id, "method": method}, st.sampled_from(IDS), st.sampled_from(["ping", 7, None])
    ),
    st.builds(lambda id: call(id, inputResponses={}), st.sampled_from(IDS)),
    st.builds(lambda id: answer(id, resultType="input_required"), st.sampled_from(IDS)),
    st.builds(lambda id: answer(id, task={"taskId": "t"}), st.sampled_from(IDS)),
    st.builds(lambda id: {"id": id, "method": "tasks/result", "params": {"taskId": "t"}}, st.sampled_from(IDS)),
    st.sampled_from([{}, {"result": 1}, {"id": 1, "params": 7}, {"id": 1, "result": None, "error": None}]),
)


@given(st.lists(st.tuples(st.booleans(), MESSAGES), max_size=40))
def test_nothing_is_doubled_whoever_breaks_the_protocol(steps: list[tuple[bool, Any]]) -> None:
    talk = Talk()
    for client, said in steps:
        (talk.sent if client else talk.received)(said)
    calls = [event["call_id"] for event in talk.of("tool_call")]
    results = [event["call_id"] for event in talk.of("tool_result")]
    begun = [said for client, said in steps if client and said.get("method") == "tools/call"]
    named = [said for said in begun if isinstance(said["params"]["name"], str)]
    again = [said for said in named if "inputResponses" in said["params"]]
    assert len(set(calls)) == len(calls)
    assert len(set(results)) == len(results)
    assert set(results) <= set(calls)
    assert len(named) - len(again) <= len(calls) <= len(named)
    for event in talk.of("tool_result"):
        before = talk.events[: talk.events.index(event)]
        assert any(one["kind"] == "tool_call" and one["call_id"] == event["call_id"] for one in before)


def test_a_call_says_what_was_sent_and_where_it_came_from() -> None:
    meta = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    talk = Talk().sent(call(1, arguments={"z": "Zürich", "a": 1.0}, _meta=meta), call(2))
    one, two = talk.events
    assert json.loads(one["arguments"]) == {"z": "Zürich", "a": 1.0}
    assert (one["name"], one["server"], one["join"], one["traceparent"]) == ("add", "calc", True, meta["traceparent"])
    assert (two["arguments"], two["traceparent"]) == ("{}", None)
    raw = b'{"id":1,"method":"tools/call","params":{"name":"f","arguments":{ "b":1.0,  "a":"\\u00e9\xff"}}}'
    (event,) = Talk().fold.from_client(messages(raw)[0], 0, "beside")
    assert event["arguments"] == '{ "b":1.0,  "a":"\\u00e9\ufffd"}'
    assert event["traceparent"] == "beside"


def test_each_way_to_end() -> None:
    talk = Talk().sent(*(call(id) for id in range(5)))
    talk.received(answer(0, content=[{"type": "text", "text": "7"}], structuredContent={"sum": 7}))
    talk.received(answer(1, content=[], isError=True), {"id": 2, "error": {"code": -32602, "message": "no"}})
    talk.sent(cancel(3)).received(answer(3))
    talk.events += talk.fold.broken_off([("number", 4)], "error", "gone", 100)
    results = talk.of("tool_result")
    assert [event["status"] for event in results] == ["ok", "error", "error", "cancelled", "error"]
    assert json.loads(results[0]["content"])["structuredContent"] == {"sum": 7}
    assert json.loads(results[2]["content"]) == {"code": -32602, "message": "no"}
    assert json.loads(results[3]["content"])["reason"] == "enough"
    assert results[4]["content"] == "gone"


def test_a_call_that_is_asked_again_for_more_input_is_one() -> None:
    parked = ParkedCalls()
    for state in ({"requestState": "s"}, {}):
        first, second = Talk(parked), Talk(parked)
        first.sent(call(1, arguments={"a": 1})).received(answer(1, resultType="input_required", **state))
        second.sent(call(2, arguments={"a": 1}, inputResponses={}, **state)).received(answer(2))
        assert [event["kind"] for event in first.events] == ["tool_call"]
        (result,) = second.events
        assert (result["kind"], result["call_id"]) == ("tool_result", first.events[0]["call_id"])


def test_a_call_whose_result_is_fetched_as_a_task_is_one() -> None:
    talk = Talk().sent(call(1)).received(answer(1, task={"taskId": "t", "status": "working"}))
    talk.sent({"id": 2, "method": "tasks/result", "params": {"taskId": "t"}}).received(answer(2, content=[1]))
    assert [event["kind"] for event in talk.events] == ["tool_call", "tool_result"]


def test_what_waits_is_bounded() -> None:
    talk = Talk().sent(*(call(id) for id in range(6000)), *(call("same") for _ in range(100)))
    talk.received(*(answer(id) for id in range(6000)), *(answer("same") for _ in range(100)))
    assert 4000 < len(talk.of("tool_result")) < 4200
    talk.now = bounds.WAIT_MS * 10_000
    talk.sent(call(1))
    talk.now *= 2
    assert talk.received(answer(1)).events[-1]["latency_us"] == bounds.WAIT_MS * 1000
