"""What was said, told from governed events alone."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millrace.consumers.tell.command import explain_in
from millrace.consumers.tell.events import MOST, texts_in
from millrace.consumers.tell.topics import PolicyTopics
from millrace.infra.log.history.requests import WholeRequests
from millrace.infra.log.history.rows import Row
from millrace.schemas.errors import CorruptRecord
from tests.support.history import History
from tests.support.history_log import NS
from tests.support.history_records import POLICY

ASKED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]},
    {"role": "tool", "content": [{"type": "text", "text": "It "}, {"type": "text", "text": "rains."}]},
]


class Event(SimpleNamespace):
    """As much of a row as is read."""

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


def said(kind: str, **body: Any) -> list[tuple[str, str]]:
    row = Event(kind=kind, body=body, id="e", trajectory="t")
    return texts_in(cast("Row[Any]", row), WholeRequests())


def call(request: object, response: object, choice: int = 0) -> list[tuple[str, str]]:
    sent = [part if isinstance(part, bytes) else json.dumps(part).encode() for part in (request, response)]
    whole = {"request_base": None, "request_kept": {}}
    return said("model_call", request=sent[0], response=sent[1], choice=choice, **whole)


def test_a_call_tells_what_came_since_the_model_last_spoke_and_its_own_choice() -> None:
    replies = [{"index": n, "message": {"role": "assistant", "content": f"Rain {n}."}} for n in (0, 1)]
    assert call({"messages": ASKED}, {"choices": replies}, 1) == [("tool", "It rains."), ("assistant", "Rain 1.")]
    assert call({"messages": ASKED[:2]}, {"choices": [{"message": ASKED[2]}]}) == [
        ("system", "Be brief."),
        ("user", "Weather?"),
        ("assistant calls", '{"name": "look", "arguments": "{}"}'),
    ]
    assert call({"messages": []}, {"role": "assistant", "content": "Rain."}) == [("assistant", "Rain.")]


@pytest.mark.parametrize("odd", [b"", b"no JSON", b"[1]", b"\xff", b'{"messages": 5}'])
def test_what_is_no_chat_is_shown_as_it_is(odd: bytes) -> None:
    text = odd.decode("utf-8", "replace")
    assert call(odd, odd) == ([("request", text), ("response", text)] if odd else [])


@pytest.mark.parametrize("odd", [{"choices": 5}, {"choices": [5]}, {"choices": [{"message": 5}]}, {"choices": None}])
def test_an_answer_without_a_message_is_shown_as_it_is(odd: object) -> None:
    assert call({"messages": []}, odd) == [("response", json.dumps(odd))]


def test_other_events_tell_their_texts_and_a_long_one_is_cut() -> None:
    assert said("tool_result", content="x" * (MOST + 5)) == [("content", "x" * MOST + " ... (5 characters more)")]
    assert said("reward", critique=None) == []
    assert said("gap", missed=3) == []


def test_a_body_that_cannot_be_read_says_nothing() -> None:
    class Broken(Event):
        @property
        def body(self) -> Any:
            raise CorruptRecord("no")

    assert texts_in(cast("Row[Any]", Broken(kind="reward")), WholeRequests()) == []


def test_only_what_was_governed_is_shown_and_only_on_request() -> None:
    h = History(0, versions=1)
    episode = h.episode("group-new", 0, None)
    words = {"call_id": "c", "name": "look", "content": "it rains", "status": "ok", "tool_version": None}
    words |= {"latency_us": 0, "side_effect": None}

    def told(text: bool) -> str:
        return explain_in(PolicyTopics(h.bus, NS, POLICY), episode["trajectory"], text=text).text

    h.speak(episode, "tool_result", words)
    assert "tool result look" in told(True)
    assert "it rains" not in told(True), "refine has not read it yet"
    h.refine()
    assert "content: it rains" in told(True)
    assert "it rains" not in told(False)
