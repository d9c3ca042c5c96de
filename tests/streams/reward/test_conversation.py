"""A judge reads all calls of an episode, as the history has them and nobody else's, or none of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.dialects.rendering.template import TemplateRenderer
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from millrace.infra.config import Reward, RewardJudge
from millrace.infra.engines.base import Sampling
from millrace.infra.engines.upstream import NOT_WHOLE
from millrace.infra.log.base import Outgoing, Record, TopicSpec
from millrace.infra.log.memory.bus import MemoryBus
from millrace.schemas import codec, envelope
from millrace.schemas.ids import new_id
from millrace.schemas.records import Event
from millrace.schemas.requests import RequestStore
from millrace.streams.reward import rubric
from millrace.streams.reward.asking import AskedJudge
from millrace.streams.reward.choose import choose, conversations
from millrace.streams.reward.conversation import Conversations, JudgedCall, began, text_of
from millrace.streams.reward.judge import Evaluator, Judge
from millrace.testing.events import Episode, model_call
from tests.support import chat_tokenizer
from tests.support.fake_http import answer, serving
from tests.support.gateway_world import RAW, ScriptedEngine, world

TOPIC = "ns.events"


def written(bus: MemoryBus, events: Sequence[Event]) -> Record:
    """Events in the history, in this order; the record of the last."""
    bus.ensure_topics([TopicSpec(TOPIC, 1)])
    with bus.publisher() as publisher:
        for event in events:
            headers = {name: said.encode() for name, said in envelope.headers_of(event).items()}
            publisher.publish(Outgoing(TOPIC, b"k", codec.encode("Event", event), headers)).result(10)
    return list(bus.read(TOPIC, 0))[-1]


@given(st.lists(st.sampled_from("abc"), max_size=20), st.booleans())
def test_it_has_every_call_of_its_episode_and_no_other(order: list[str], named: bool) -> None:
    """However episodes are interleaved, whatever their ids say of when they began."""
    ids = {name: new_id() if named else name for name in "abc"}
    episodes = {name: Episode(id, task='{"answer": "x"}') for name, id in ids.items()}
    events = [episode.start() for episode in episodes.values()]
    for number, name in enumerate(order):
        events.append(episodes[name].call(f"reply-{number}", text=f"question {number} of {name}"))
    bus = MemoryBus()
    end = written(bus, [*events, episodes["a"].end()])
    found = Conversations(bus, TOPIC, None, 1 << 20).of(end, codec.decode_as("Event", end.value or b""))
    mine = [number for number, name in enumerate(order) if name == "a"]
    if not mine:
        assert found is None
        return
    asked = [call["request"]["messages"][-1]["content"] for call in json.loads(found or "")["calls"]]
    assert asked == [f"question {number} of a" for number in mine]


def test_an_id_says_when_nothing_of_it_was_there() -> None:
    from millrace.schemas.ids import now_micros

    before = now_micros()
    assert before - 1000 <= began(new_id()) <= now_micros()
    assert began("chat-7") == began("00000000-0000-4000-8000-000000000000") == 0


calls = st.lists(st.tuples(st.integers(1, 400), st.booleans()), min_size=1, max_size=8)


@settings(max_examples=200)
@given(calls, st.integers(200, 4000))
def test_what_is_shown_fits_and_says_what_is_left_out(given_: list[tuple[int, bool]], most: int) -> None:
    made = [
        JudgedCall(str(at), model_call(f"r{at}", text="x" * size, supersedes=f"r{at - 1}" if again and at else None))
        for at, (size, again) in enumerate(given_)
    ]
    found = text_of(made, most)
    whole = text_of(made, 1 << 30)
    assert whole is not None
    everything = json.loads(whole)["calls"]
    assert [call["call"] for call in everything] == list(range(1, len(made) + 1))
    for at, call in enumerate(everything[:-1]):
        assert call.get("asked_once_more", False) == given_[at + 1][1]
    if found is None:
        assert len(whole) > most
        return
    assert len(found.encode()) <= most
    shown = json.loads(found)
    left_out = shown.get("calls_left_out_behind_the_first", 0)
    assert shown["calls"] == [everything[0], *everything[1 + left_out :]]


def test_what_is_not_all_there_is_no_conversation() -> None:
    call = model_call("r", text="hi")
    assert text_of([], 1000) is None
    assert text_of([JudgedCall("e", {**call, "request_base": "gone", "request_kept": {"messages": 1}})], 1000) is None
    partly = text_of([JudgedCall("e", {**call, "opened": NOT_WHOLE})], 1000)
    assert json.loads(partly or "")["calls"][0]["earlier_messages"] == "not known"
    odd = text_of([JudgedCall("e", {**call, "request": b"\xff", "response": b"{"})], 1000)
    assert json.loads(odd or "")["calls"][0]["request"] == "\ufffd"


async def test_a_conversation_that_the_gateway_recorded_is_read_whole(tmp_path: Path) -> None:
    renderer = TemplateRenderer(ChatTokenizer(chat_tokenizer.write(tmp_path / "chat")))

    def script(prompt: list[int], sampling: Sampling, choice: int) -> Sequence[int]:
        return renderer.tokenizer.encode("Yes.<|im_end|>")

    async with world(tmp_path, renderer, ScriptedEngine(script), max_model_len=50_000) as w:
        session = await w.start(task={"answer": "x"})
        talk: list[dict[str, Any]] = [{"role": "system", "content": "Be brief. " * 100}]
        for number in range(4):
            talk.append({"role": "user", "content": f"question {number} {'x' * 600}"})
            reply = await w.chat(talk, session["api_key"])
            talk.append(reply.json()["choices"][0]["message"])
        ended = await w.http.post(
            f"/v1/sessions/{session['session']}/end", json={}, headers={"authorization": f"Bearer {session['api_key']}"}
        )
        assert ended.status_code == 200
        assert w.forwarder.drain(10)
        (end,) = [
            record
            for partition in range(2)
            for record in w.bus.read(RAW, partition)
            if record.headers["kind"] == b"episode_ended"
        ]
        found = Conversations(w.bus, RAW, None, 1 << 20).of(end, codec.decode_as("Event", end.value or b""))
        whole = [call["request"] for call in w.calls()]
    shown = json.loads(found or "")["calls"]
    assert len(shown) == 4
    assert shown[-1]["goes_on_from_call"] == 3
    assert sum(len(json.dumps(call["request"])) for call in shown) < 2 * len(whole[-1])
    store = RequestStore()
    for number, call in enumerate(shown, 1):
        base = call.get("goes_on_from_call")
        kept = call.get("repeats_of_it", {})
        body = {
            "request": json.dumps(call["request"]).encode(),
            "request_base": base and str(base),
            "request_kept": kept,
        }
        request = store.add(str(number), body)
        assert json.loads(request or b"") == json.loads(whole[number - 1])


async def judged(folder: Path, events: Sequence[Event], **more: Any) -> tuple[Any, list[dict[str, Any]]]:
    """The reward, and what its judge was asked."""
    (folder / "rubric.md").write_text("r")
    bus = MemoryBus()
    end = written(bus, events)
    async with serving(answer(b'{"choices": []}')) as server:
        options = RewardJudge(url=server.url, model="m", rubric=str(folder / "rubric.md"), conversation=True, **more)
        chosen = choose(Reward(verifier="judge", judge=options))
        read = conversations(chosen, bus, TOPIC, None)
        out = await Judge(chosen, Evaluator("verifier", chosen.version, "1"), "p", conversations=read)(end)
        assert out is not None
        body = codec.decode_body("reward", codec.decode_as("Event", out.value or b"")["body"])
        return body, [json.loads(sent) for _, sent in server.requests]


def episode(*, whole: bool = True) -> list[Event]:
    made = Episode("r1", ticket=5, size=2, sample=1, task='{"answer": "x"}')
    return [made.start(), made.call("reply-1", text="what it was asked"), made.end(output="said", whole=whole)]


async def test_the_judge_is_told_of_it_and_its_number_is_of_all_of_it(tmp_path: Path) -> None:
    reward, (asked,) = await judged(tmp_path, episode())
    system, user = asked["messages"]
    assert rubric.CONVERSATION in system["content"]
    assert system["content"].endswith("The rubric:\nr")
    case = json.loads(user["content"])
    assert "what it was asked" in case["conversation"]
    number = rubric.number("r", case["task"], "said", case["conversation"])
    assert case["case"] == number != rubric.number("r", case["task"], "said")
    assert reward["source_version"] == rubric.version("m", "r", conversation=True) != rubric.version("m", "r")


@pytest.mark.parametrize(
    ("events", "more"),
    [(episode(whole=False), {}), (episode(), {"conversation_bytes": 100}), ([episode()[0], episode()[-1]], {})],
    ids=["not whole", "too long", "no call"],
)
async def test_without_a_conversation_nobody_is_asked(tmp_path: Path, events: list[Event], more: Any) -> None:
    reward, asked = await judged(tmp_path, events, **more)
    assert (reward["value"], reward["failure"], asked) == (None, "no_conversation", [])


async def test_a_withheld_call_is_not_shown(tmp_path: Path) -> None:
    start, call, end = episode()
    withheld = envelope.link({**call, "body_encoding": "sealed"})
    reward, asked = await judged(tmp_path, [start, withheld, end])
    assert (reward["failure"], asked) == ("no_conversation", [])


@pytest.mark.parametrize("decided", [{"eligibility": "denied"}, {"redaction": "failed"}], ids=["denied", "unread"])
async def test_a_call_that_was_blanked_is_not_judged_by_what_stands_in_its_place(tmp_path: Path, decided: Any) -> None:
    start, call, end = episode()
    governance: Any = {
        "eligibility": "aggregate",
        "reason": "rule",
        "classification": "internal",
        "redaction": "none_needed",
        "redaction_version": "1",
        "policy_version": "1",
        "counts": {},
        "findings": [],
        "retention_until": None,
        "residency": None,
    }
    whole, blanked = (envelope.link({**call, "governance": {**governance, **more}}) for more in ({}, decided))
    _, asked = await judged(tmp_path, [start, whole, end])
    assert len(asked) == 1
    reward, asked = await judged(tmp_path, [start, blanked, end])
    assert (reward["failure"], asked) == ("no_conversation", [])


def test_a_judge_that_reads_none_looks_nothing_up(tmp_path: Path) -> None:
    (tmp_path / "rubric.md").write_text("r")
    chosen = AskedJudge(RewardJudge(url="http://x/v1", model="m", rubric=str(tmp_path / "rubric.md")), 1.0)
    assert conversations(chosen, MemoryBus(), TOPIC, None) is None
    assert conversations(choose(Reward(verifier="exact")), MemoryBus(), TOPIC, None) is None
