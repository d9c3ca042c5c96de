"""What a record of a call leaves out is read with it, or the call is not taken for a whole conversation."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from millrace.consumers.tell.events import texts_in
from millrace.dialects.dialogue import Unsayable, dialogue
from millrace.infra.log.base import Record
from millrace.infra.log.history.requests import WholeRequests, whole_calls
from millrace.infra.log.history.rows import Row
from millrace.producers.gateway.sessions.request_trail import RequestTrail
from millrace.schemas import codec
from millrace.schemas.requests import outline_request
from millrace.testing.events import model_call

TALK = [
    {"role": "system", "content": "s" * 600},
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "second"},
]
REPLY = orjson.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": "Yes."}}]})


def asked(count: int) -> bytes:
    return orjson.dumps({"model": "m", "messages": TALK[:count]})


def row(name: str, trajectory: str, trail: RequestTrail, request: bytes) -> Any:
    """The event of a call as a gateway would record it."""
    stored = trail.compress(request, outline_request(request))
    fields = {"request": stored.request, "request_base": stored.base, "request_kept": stored.overlap}
    body = {**model_call(name, reply=REPLY), **fields}
    trail.add(name, outline_request(request))
    event = {"id": name, "trajectory": trajectory, "kind": "model_call", "body": codec.encode_body("model_call", body)}
    return Row(Record("e", 0, 0, b"", b"", {}, 0), "Event", event, b"", "events")  # type: ignore[type-var]


def test_calls_are_whole_in_any_order_and_of_any_trajectories() -> None:
    one, other = RequestTrail(), RequestTrail()
    rows = [row("a", "t", one, asked(2)), row("b", "u", other, asked(2)), row("c", "t", one, asked(4))]
    assert [call.body["request_base"] for call in rows] == [None, None, "a"]
    for calls in (rows, rows[::-1]):
        found = {call["response_id"]: call for call in whole_calls(calls)}
        assert found["c"]["request"] == asked(4)
        assert [message["content"] for message in dialogue(found["c"]).messages] == [one["content"] for one in TALK]


@pytest.mark.parametrize("trajectory", ["t", "u"])
def test_a_part_of_a_conversation_is_never_taken_for_all_of_it(trajectory: str) -> None:
    """Where what it goes on from is not there, or is another trajectory's."""
    trail = RequestTrail()
    first, second = row("a", trajectory, trail, asked(2)), row("c", "t", trail, asked(4))
    (*_, call) = whole_calls([second] if trajectory == "t" else [first, second])
    assert call["request_base"] == "a"
    with pytest.raises(Unsayable) as refused:
        dialogue(call)
    assert refused.value.code == "not_whole"


def test_what_was_said_is_told_with_and_without_what_it_goes_on_from() -> None:
    trail = RequestTrail()
    rows = [row("a", "t", trail, asked(2)), row("c", "t", trail, asked(4))]
    requests = WholeRequests()
    assert texts_in(rows[0], requests)[1:] == [("user", "first"), ("assistant", "Yes.")]
    for known in (requests, WholeRequests()):
        assert texts_in(rows[1], known) == [("user", "second"), ("assistant", "Yes.")]
