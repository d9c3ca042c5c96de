"""What is kept of responses: a conversation whole or not at all, for its owner alone, in bounded memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.dialects.errors import ApiError
from millrace.dialects.stored_responses import StoredRequest, StoredResponse
from millrace.producers.gateway.sessions.ownership import Hints
from millrace.producers.gateway.sessions.responses import OVERHEAD, ResponseRecall, ResponseStore, owner_of
from millrace.producers.gateway.sessions.session import GatewaySession
from millrace.producers.gateway.sessions.sessions import Sessions

steps = st.lists(
    st.tuples(
        st.sampled_from(range(3)),  # who speaks
        st.sampled_from(("previous", "whole", "branch", "new", "change", "look")),
        st.integers(0, 400),  # bytes of what is said, micros that pass
        st.integers(0, 30),  # which response is meant
    ),
    max_size=40,
)


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> list[GatewaySession]:
    made = Sessions(Path(tmp_path_factory.mktemp("sessions")), "policy")
    return [
        made.make_session("one", Hints(None, ""), (), 1),
        made.make_session("two", Hints(None, ""), (), 1),
        made.make_session("one", Hints("chat-1", ""), (), 1),
    ]


def an_item(number: int, size: int) -> dict[str, Any]:
    return {"role": "user", "content": f"{number}" + "x" * size}


def items(found: list[dict[str, Any]]) -> list[bytes]:
    return [msgspec.json.encode(item) for item in found]


def answer(id: str, size: int) -> dict[str, Any]:
    made = id.removeprefix("resp_")
    text = {"type": "output_text", "text": "y" * size}
    message = {"id": f"msg_{made}_0", "type": "message", "role": "assistant", "content": [text]}
    call = {"id": f"fc_{made * 3}", "type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    return {"id": id, "object": "response", "output": [message, call]}


@settings(max_examples=150, deadline=None)
@given(steps=steps, most=st.sampled_from((OVERHEAD * 8, OVERHEAD * 40, 1 << 20)), idle=st.sampled_from((0.0005, 60.0)))
def test_a_conversation_is_whole_or_forgotten_and_its_owners_alone(
    sessions: list[GatewaySession], steps: list[tuple[int, str, int, int]], most: int, idle: float
) -> None:
    stored, now = ResponseStore(idle, most), 1
    said: list[tuple[int, str, list[dict[str, Any]], dict[str, Any]]] = []
    for number, (who, what, size, which) in enumerate(steps):
        now += size
        own = [one for one in said if one[0] == who]
        former = own[-1 if what == "previous" else which % len(own)] if own else None
        previous, whole = None, [an_item(number, size)]
        if former is not None and what in ("previous", "branch", "whole", "change"):
            whole = [*former[2], *former[3]["output"], *whole]
            previous = former[1] if what in ("previous", "branch") else None
        if what == "change":  # as clients change what they echo
            whole[0] = an_item(number, 1)
        if what != "look":
            id = f"resp_{number}"
            response = answer(id, size)
            stored.keep(id, sessions[who], StoredRequest(items(whole), previous), msgspec.json.encode(response), now)
            said.append((who, id, whole, response))
        assert stored.size <= most
        for tenant in stored._of.values():
            uses = [kept.used for kept in tenant.responses.values()]
            assert uses == sorted(uses)
            assert tenant.size == sum(kept.size for kept in tenant.responses.values())
        assert stored.size == sum(kept.size for kept in stored._kept.values())
        for whose, id, asked, response in said:
            for session in sessions:
                recall = ResponseRecall(stored, owner_of(session), 1 << 30)
                found, entry = recall.conversation(id), recall.response(id)
                output = [recall.item(item["id"]) for item in response["output"]]
                if session is not sessions[whose]:
                    assert (found, entry, *output) == (None,) * 4
                elif most == 1 << 20 and idle > 1:
                    assert found is not None
                assert found is None or found == items([*asked, *response["output"]])
                assert output in ([None, None], items(response["output"]))
                assert entry is None or msgspec.json.decode(entry) == response
                assert bool(recall.used) == (found is not None or output != [None, None])

    stored.sweep(now + 61_000_000)
    assert (stored.size, stored._kept, stored._of, stored._items, stored._newest) == (0, {}, {}, {}, {})


@given(st.lists(st.tuples(st.sampled_from(range(2)), st.integers(0, 3000)), max_size=40), st.integers(4, 40))
def test_who_holds_less_loses_nothing_to_who_holds_more(
    sessions: list[GatewaySession], said: list[tuple[int, int]], most: int
) -> None:
    stored, own = ResponseStore(60.0, most * OVERHEAD), (list[str](), list[str]())
    for number, (who, size) in enumerate(said):
        before = [{kept.id for kept in stored._kept.values() if kept.id in ids} for ids in own]
        held = [sum(stored._kept[id].size for id in ids) for ids in before]
        id = f"resp_{number}"
        own[who].append(id)
        stored.keep(id, sessions[who], StoredRequest([b"{}"], None), msgspec.json.encode(answer(id, size)), number + 1)
        other = 1 - who
        if held[other] <= stored._most // 2:
            assert before[other] <= stored._kept.keys(), "half of the memory is safe"


class Watched(StoredResponse):
    """A response of which somebody else forgets everything at the `when`-th look at it."""

    when = 0

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name in ("before", "said"):
            Watched.when -= 1
            if not Watched.when:
                self.said = self.before = None
        return value


@pytest.mark.parametrize("when", range(7))
def test_a_conversation_that_is_forgotten_meanwhile_is_whole_or_none(when: int) -> None:
    line: StoredResponse | None = None
    for number in range(3):
        said = ([b"q%d" % number], msgspec.json.encode(answer(f"resp_{number}", 1)))
        line = Watched(f"resp_{number}", ("t",), "s", line, True, said, 1)
    assert line is not None
    Watched.when = 0
    whole = line.conversation()
    assert whole is not None
    assert len(whole) == 9
    Watched.when = when
    assert line.conversation() in (None, whole)


@pytest.mark.parametrize("named", [False, True], ids=["whole", "named"])
def test_memory_grows_with_what_is_new(sessions: list[GatewaySession], named: bool) -> None:
    stored, talk, new = ResponseStore(60.0), list[dict[str, Any]](), 0
    for number in range(200):
        talk.append(an_item(number, 1000))
        id, previous = f"resp_{number}", f"resp_{number - 1}" if named else None
        response = answer(id, 1000)
        stored.keep(id, sessions[0], StoredRequest(items(talk), previous), msgspec.json.encode(response), number)
        talk += response["output"]
        new += 4 * 1000 + 8 * OVERHEAD
    assert stored.size < 2 * new
    found = ResponseRecall(stored, owner_of(sessions[0]), 1 << 30).conversation("resp_100")
    assert found == items(talk[: 3 * 101])


def test_a_small_request_names_no_more_than_a_request_may_hold(sessions: list[GatewaySession]) -> None:
    stored, response = ResponseStore(60.0), answer("resp_1", 5000)
    stored.keep("resp_1", sessions[0], StoredRequest(items([an_item(1, 1)]), None), msgspec.json.encode(response))
    item = response["output"][0]["id"]
    recall = ResponseRecall(stored, owner_of(sessions[0]), 20_000)
    found = [recall.item(item) for _ in range(3)]
    assert found == items(response["output"][:1]) * 3
    for again in (recall.item, lambda _: recall.conversation("resp_1")):
        with pytest.raises(ApiError) as refused:
            again(item)
        assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
    assert len(recall.used) <= 2
