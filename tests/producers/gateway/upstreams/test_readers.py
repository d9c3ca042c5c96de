"""Whatever an upstream says is read without an error, as a start of the gateway reads it, in pieces of bounded work."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.dialects import shape
from millrace.dialects.all import read
from millrace.dialects.reading import events as module
from millrace.dialects.reading.chat_assembler import CallParts, ChoiceParts
from millrace.dialects.reading.reader import ReadAnswer
from millrace.schemas import bounds
from tests.support import logged
from tests.support import upstream_answers as answers
from tests.support.upstream_answers import READERS

each = pytest.mark.parametrize("api", sorted(READERS))
many = settings(max_examples=150, database=None, deadline=None)
seeds = st.integers(0, 2**32)


def reads_alike(api: str, response: bytes, found: ReadAnswer | None) -> None:
    """Whether the log says of a response what was said when it came."""
    if found is None:
        return
    numbers = [said.choice for said in found.answer.choices]
    assert len(set(numbers)) == len(numbers) == len(found.digests)
    replies = read(answers.REQUEST[api], response).replies
    assert {said.choice: said.message for said in found.answer.choices} == replies


@each
def test_any_answer(api: str, caplog: pytest.LogCaptureFixture) -> None:
    @many
    @given(seeds)
    def holds(seed: int) -> None:
        body = answers.whole(Random(seed), api)
        reads_alike(api, body, READERS[api].answer(body, b""))

    holds()
    assert not logged.records(caplog, "millrace.producers.gateway"), "nothing was unforeseen"
    body = orjson.dumps(answers.WHOLE[api])
    assert READERS[api].answer(body, b"") is not None


@each
def test_any_stream(api: str, caplog: pytest.LogCaptureFixture) -> None:
    @many
    @given(seeds, st.integers(1, 400), st.booleans())
    def holds(seed: int, part: int, cut: bool) -> None:
        raw = answers.stream(Random(seed), api)
        events = READERS[api].assembler()
        for at in range(0, len(raw), part):
            events.feed(raw[at : at + part])
        if cut:
            events.finish = "abort"
        response, found = READERS[api].whole(events, b"")
        reads_alike(api, response, found)

    holds()
    assert not logged.records(caplog, "millrace.producers.gateway"), "nothing was unforeseen"


def deep(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


def put(api: str, value: bytes) -> bytes:
    """An answer with a value in a place that is read."""
    given = {**answers.WHOLE[api], "x": "HERE"}
    return orjson.dumps(given).replace(b'"HERE"', value)


@each
@pytest.mark.parametrize("levels", [bounds.DEPTH + 1, 260, 1000, 1100, 200_000])
def test_what_is_too_deep_is_not_read(api: str, levels: int) -> None:
    assert READERS[api].answer(put(api, deep(bounds.DEPTH // 2)), b"") is not None
    assert READERS[api].answer(put(api, deep(levels)), b"") is None
    events = READERS[api].assembler()
    for event in answers.EVENTS[api]:
        events.feed(b"data: " + orjson.dumps(event) + b"\n\n")
    assert events.unread == 0
    sound = READERS[api].whole(events, b"")
    assert sound[1] is not None
    events.feed(b"data: " + orjson.dumps({**answers.EVENTS[api][-1], "x": 0})[:-2] + deep(levels) + b"}\n\n")
    assert events.unread == 1
    assert READERS[api].whole(events, b"")[0] == sound[0]


@each
def test_no_piece_of_work_is_large(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []

    class Loads:
        JSONDecodeError = orjson.JSONDecodeError

        @staticmethod
        def loads(data: bytes) -> Any:
            parsed.append(data)
            return orjson.loads(data)

    monkeypatch.setattr(module, "orjson", Loads)
    events = READERS[api].assembler()
    for data in (
        b'{"id":"c","x":[' + b"[]," * bounds.VALUES + b"[]]}",
        b'{"id":"c","x":[' + b"[]," * (bounds.VALUES // 2) + b"[]]}",
        b'{"x":"' + b"x" * bounds.EVENT_BYTES + b'"}',
        b'{"x":"' + b"x" * (bounds.EVENT_BYTES - 100) + b'"}',
        b'{"x":1}',
    ):
        raw = b"data: " + data + b"\n\n"
        for at in range(0, len(raw), 8192):
            events.feed(raw[at : at + 8192])
    assert len(parsed) == 2
    assert events.unread >= 3
    assert all(len(data) <= bounds.EVENT_BYTES and not shape.unwieldy(data) for data in parsed)


class Counted(list[CallParts]):
    """A list that counts what is looked through."""

    seen = 0

    def __iter__(self) -> Iterator[CallParts]:
        Counted.seen += len(self)
        return super().__iter__()


def test_pieces_of_tool_calls_are_not_looked_for_among_all_of_them() -> None:
    parts = ChoiceParts()
    parts.calls = Counted()
    for at in range(bounds.CALLS):
        assert parts.take({"tool_calls": [{"id": f"c{at}"}, {"function": {"arguments": str(at)}}]})
    assert not parts.take({"tool_calls": [{}] * (bounds.CALLS + 1)})
    assert not parts.take({"tool_calls": [{"id": "one more"}]})
    assert Counted.seen == 0
    calls = parts.message()["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == [str(at) for at in range(bounds.CALLS)]


def test_counts_of_a_message_are_brought_up_to_date_in_place() -> None:
    events = READERS["messages"].assembler()
    events.take(answers.EVENTS["messages"][0])
    held = events.response()["usage"]
    for at in range(3):
        events.take({"type": "message_delta", "usage": {"output_tokens": at}})
        assert events.response()["usage"] is held, "a copy for each would grow with their square"
    assert held == {"input_tokens": 1, "output_tokens": 2}


@pytest.mark.parametrize(
    ("api", "begin"),
    [
        ("messages", {"type": "content_block_start", "content_block": {"type": "text", "text": "x"}}),
        ("responses", {"type": "response.output_item.added", "item": {"type": "message"}}),
    ],
)
def test_parts_of_a_reply_have_a_bound(api: str, begin: dict[str, Any]) -> None:
    events = READERS[api].assembler()
    at = "index" if api == "messages" else "output_index"
    assert all(events.take({**begin, at: number}) for number in range(bounds.PARTS))
    assert not events.take({**begin, at: bounds.PARTS})
    assert events.take({**begin, at: bounds.PARTS - 1}), "one that is known is not a new one"


def test_inputs_of_tools_are_parsed_as_far_as_they_have_few_values() -> None:
    events = READERS["messages"].assembler()
    said = "[" + "[]," * (bounds.VALUES // 6) + "[]]"
    events.take(answers.EVENTS["messages"][0])
    for index in range(5):
        events.take({"type": "content_block_start", "index": index, "content_block": {"type": "tool_use", "id": "t"}})
        piece = {"type": "input_json_delta", "partial_json": said}
        assert events.take({"type": "content_block_delta", "index": index, "delta": piece})
    response, found = READERS["messages"].whole(events, b"")
    assert found is not None
    inputs = [block["input"] for block in orjson.loads(response)["content"]]
    assert [isinstance(given, str) for given in inputs] == [False, False, True, True, True]
    assert shape.measure(b"".join(orjson.dumps(given) for given in inputs)).values <= bounds.VALUES
    reads_alike("messages", response, found)


def test_an_answer_of_many_log_probabilities_is_read() -> None:
    """They are most of its values, and nobody reads them."""
    given: Any = {**answers.WHOLE["chat"]}
    given["choices"] = [{**choice, "logprobs": {"content": [[]] * bounds.VALUES}} for choice in given["choices"]]
    body = orjson.dumps(given)
    assert shape.unwieldy(body)
    found = READERS["chat"].answer(body, b"")
    assert found is not None
    reads_alike("chat", body, found)
    assert READERS["chat"].answer(body.replace(b'"logprobs"', b'"others"'), b"") is None
    assert READERS["chat"].answer(b"[" + body + b"]", b"") is None


@given(st.lists(st.sampled_from([0, 1, 2, 5, -1, None, "0", 2**31]), max_size=130))
def test_no_two_choices_have_one_number(indexes: list[Any]) -> None:
    said = [{"index": index, "message": {"content": str(at)}} for at, index in enumerate(indexes)]
    body = orjson.dumps({"choices": said})
    found = READERS["chat"].answer(body, b"")
    assert found is not None
    choices = found.answer.choices
    assert [choice.message["content"] for choice in choices] == [str(at) for at in range(len(choices))]
    assert len(choices) == min(len(indexes), bounds.CHOICES)
    reads_alike("chat", body, found)
    for at, choice in enumerate(choices):
        if indexes[at] in (0, 1, 2, 5) and indexes[at] not in indexes[:at]:
            earlier = {taken.choice for taken in choices[:at]}
            assert choice.choice == indexes[at] or indexes[at] in earlier
