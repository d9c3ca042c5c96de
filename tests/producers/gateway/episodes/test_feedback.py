"""Feedback that names a reply or a conversation, and the weak signal of a message that follows a reply."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.dialects.rendering.template import TemplateRenderer
from millrace.producers.gateway.sessions.reply_index import ReplyGivers, SeveralReplies
from tests.producers.gateway.sessions.test_sessions import make_engine
from tests.support.gateway_world import World, world

USER = {"role": "user", "content": "What is 3 + 4?"}
KEYS = {"sk-app": "local", "sk-other": "other"}
SAID = "The answer is 42."


async def said(w: World, key: str = "sk-app", **body: Any) -> tuple[int, dict[str, Any]]:
    answer = await w.http.post("/v1/feedback", json=body, headers={"authorization": f"Bearer {key}"})
    return answer.status_code, answer.json()


async def reply(w: World, messages: Any = (USER,), **headers: str) -> str:
    answer = await w.http.post(
        "/v1/chat/completions",
        json={"model": "m", "messages": list(messages)},
        headers={"authorization": "Bearer sk-app", **headers},
    )
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def rewards(w: World) -> list[dict[str, Any]]:
    return [event["data"] for event in w.events() if event["kind"] == "reward"]


async def test_a_rating_names_the_reply_alone_and_is_once(tmp_path: Path, renderer: TemplateRenderer) -> None:
    async with world(tmp_path, renderer, make_engine(renderer), keys=KEYS) as w:
        id = await reply(w)
        for _ in range(2):
            status, answer = await said(w, response_id=id, rating=0.25, text="meh", reward_id="r1", confidence=0.5)
            assert (status, answer["reward_id"]) == (200, "r1")
        status, _ = await said(w, response_id=id, correction="7", reward_id="r2", supersedes="r1")
        assert status == 200
        one, two = rewards(w)
        (call,) = w.calls()
    assert (one["target_kind"], one["target"]) == ("turn", call["response_id"])
    assert (one["value"], one["critique"], one["source"], one["signal"]) == (0.25, "meh", "user", "user_feedback")
    assert (one["confidence"], one["independent"]) == (0.5, True)
    assert (two["value"], two["label"], two["critique"], two["supersedes"]) == (None, "corrected", "7", "r1")


async def test_a_reply_is_known_after_a_restart_and_after_the_end(tmp_path: Path, renderer: TemplateRenderer) -> None:
    async with world(tmp_path, renderer, make_engine(renderer), keys=KEYS) as w:
        id = await reply(w)
        (session,) = w.gateway.sessions.live
        end = await w.http.post(f"/v1/sessions/{session}/end", json={}, headers={"authorization": "Bearer sk-app"})
        assert end.status_code == 200
    async with world(tmp_path, renderer, make_engine(renderer), keys=KEYS) as w:
        assert await said(w, response_id=id, rating=1, reward_id="r") == (200, {"reward_id": "r", "session": session})


async def test_what_a_full_log_does_not_take_is_refused_and_recorded_when_it_comes_again(
    tmp_path: Path, renderer: TemplateRenderer
) -> None:
    """Nothing is lost, so that the episode stays whole."""
    async with world(tmp_path, renderer, make_engine(renderer), keys=KEYS) as w:
        id = await reply(w)
        (session,) = w.gateway.sessions.live.values()
        room, path = w.log.max_waiting, f"/v1/sessions/{session.id}/reward"
        body, headers = {"value": 1, "reward_id": "r", "source": "app"}, {"authorization": "Bearer sk-app"}
        for space, status in ((0, 503), (0, 503), (room, 200), (0, 200), (room, 200)):
            w.log.max_waiting = space
            found, answer = await said(w, response_id=id, rating=1, reward_id="f")
            assert (found, answer.get("reward_id")) == (status, "f" if status == 200 else None)
            given_ = await w.http.post(path, json=body, headers=headers)
            assert given_.status_code == status
            if status != 200:
                assert (answer["error"]["code"], given_.json()["error"]["code"]) == ("log_full", "log_full")
        assert [(one["source"], one["reward_id"]) for one in rewards(w)] == [("user", "f"), ("app", "r")]
        assert session.is_whole
        assert [event["kind"] for event in w.events()].count("gap") == 0


async def test_a_reply_that_no_log_has_is_not_known(tmp_path: Path, renderer: TemplateRenderer) -> None:
    async with world(tmp_path, renderer, make_engine(renderer), keys=KEYS) as w:
        name = {"x-millrace-session": "case"}
        id = await reply(w, **name)
        room, w.log.max_waiting = w.log.max_waiting, 0
        lost = await reply(w, **name)
        w.log.max_waiting = room
        status, answer = await said(w, response_id=lost, rating=1)
        assert (status, answer["error"]["code"]) == (404, "reply_not_found")
        assert (await said(w, response_id=id, rating=1, reward_id="r"))[0] == 200
        assert [one["target"] for one in rewards(w)] == [id]


async def test_a_conversation_is_named_as_its_caller_named_it(tmp_path: Path, renderer: TemplateRenderer) -> None:
    async with world(tmp_path, renderer, make_engine(renderer), keys=KEYS) as w:
        await reply(w, **{"x-millrace-session": "case 7", "x-millrace-user": "ann"})
        (session,) = w.gateway.sessions.live
        assert (await said(w, session="case 7", user="ann", label="up"))[1]["session"] == session
        assert (await said(w, session=session, label="up"))[1]["session"] == session
        assert (await said(w, session="case 7", user="bob", label="up"))[0] == 404
        assert (await said(w, "sk-other", session=session, label="up"))[0] == 404
        assert [one["target"] for one in rewards(w)] == [session, session]


async def test_a_name_is_rewarded_by_who_gave_it_and_by_nobody_else(tmp_path: Path, renderer: TemplateRenderer) -> None:
    async def judge(w: World, name: str, key: str = "sk-app", **headers: str) -> str | None:
        """The session that took the reward of this name."""
        before = len(w.events())
        headers |= {"authorization": f"Bearer {key}"}
        path = f"/v1/sessions/{name}/reward"
        answer = await w.http.post(path, json={"value": 1.0, "source": "app"}, headers=headers)
        if answer.status_code == 404:
            assert len(w.events()) == before
            return None
        assert answer.status_code == 200, answer.text
        return str(w.events()[-1]["trajectory"])

    ann = {"x-millrace-user": "ann"}
    async with world(tmp_path, renderer, make_engine(renderer), keys=KEYS) as w:
        sessions = []
        named: list[tuple[str, dict[str, str]]] = [
            ("sk-app", {}), ("sk-other", {}), ("sk-app", ann), ("sk-app", {"thread-id": "t-1"})
        ]  # fmt: skip
        for key, headers in named:
            name = {} if "thread-id" in headers else {"x-millrace-session": "chat-1"}
            for streamed in (False, True):
                body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": streamed}
                said_by = {"authorization": f"Bearer {key}", **name, **headers}
                told = await w.http.post("/v1/chat/completions", json=body, headers=said_by)
                sessions.append(told.headers["x-millrace-trajectory"])
        mine, theirs, anns, thread = sessions[::2]
        assert sessions[1::2] == [mine, theirs, anns, thread]
        assert {event["trajectory"] for event in w.events()} == set(sessions)

    async def found(w: World) -> list[str | None]:
        return [
            await judge(w, "chat-1"), await judge(w, "chat-1", "sk-other"), await judge(w, "chat-1", **ann),
            await judge(w, "t-1"), await judge(w, "t-1", "sk-other"), await judge(w, theirs), await judge(w, "chat-2"),
        ]  # fmt: skip

    async with world(tmp_path, renderer, make_engine(renderer), keys=KEYS) as w:
        expected = [mine, theirs, anns, thread, None, None, None]
        assert await found(w) == expected
        for session in list(w.gateway.sessions.live.values()):
            await w.gateway.end(session, status="completed", stop_condition="idle")
        assert await found(w) == expected, "a reward may come after the end"
    async with world(tmp_path, renderer, make_engine(renderer), keys=KEYS) as w:
        assert await found(w) == expected, "and after a restart"
        await reply(w, **{"x-millrace-session": "chat-1"})
        assert await judge(w, "chat-1") not in (None, mine), "the newest of a name is meant"
        assert (await said(w, session="t-1", label="up"))[1]["session"] == thread


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"rating": 1}, 400, "session"),
        ({"response_id": "ID"}, 400, "rating"),
        ({"response_id": "ID", "text": "a", "correction": "b"}, 400, "correction"),
        ({"response_id": "ID", "rating": 1e9}, 400, "rating"),
        ({"response_id": "ID", "rating": 1, "confidence": 2}, 400, "confidence"),
        ({"response_id": "ID", "rating": 1, "source": "verifier"}, 403, "verifier"),
        ({"response_id": "none", "rating": 1}, 404, "none"),
        ({"session": "none", "rating": 1}, 404, "none"),
    ],
)
async def test_feedback_that_cannot_be_taken_says_why_and_leaves_nothing(
    tmp_path: Path, renderer: TemplateRenderer, body: dict[str, Any], status: int, word: str
) -> None:
    reserved = frozenset({"verifier"})
    async with world(tmp_path, renderer, make_engine(renderer), keys=KEYS, verifiers=reserved) as w:
        id = await reply(w)
        found, answer = await said(w, **{k: id if v == "ID" else v for k, v in body.items()})
        assert (found, word in answer["error"]["message"]) == (status, True), answer
        assert rewards(w) == []


async def test_no_other_tenant_and_no_agent_speaks_for_a_user(tmp_path: Path, renderer: TemplateRenderer) -> None:
    async with world(tmp_path, renderer, make_engine(renderer), keys=KEYS) as w:
        id = await reply(w)
        (session,) = w.gateway.sessions.live.values()
        assert (await said(w, "sk-other", response_id=id, rating=1))[0] == 404
        own = w.gateway.sessions.key_of(session)
        assert (await said(w, own, response_id=id, rating=1))[0] == 403
        assert rewards(w) == []


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.sampled_from("123"))))
def test_a_reply_names_a_session_only_where_one_alone_gave_it(given_: list[tuple[str, str, str]]) -> None:
    replies = ReplyGivers()
    for tenant, response, session in given_:
        replies.add(tenant, response, session)
    for tenant in "ab":
        for response in "xyz":
            owners = {session for t, r, session in given_ if (t, r) == (tenant, response)}
            if len(owners) > 1:
                with pytest.raises(SeveralReplies):
                    replies.find(tenant, response)
            else:
                assert replies.find(tenant, response) == next(iter(owners), None)


def test_the_oldest_replies_are_forgotten() -> None:
    replies = ReplyGivers(most_replies=2)
    for response in "xyz":
        replies.add("a", response, "1")
    assert [replies.find("a", response) for response in "xyz"] == [None, "1", "1"]


async def test_a_message_that_corrects_a_reply_is_a_weak_reward_of_it(
    tmp_path: Path, renderer: TemplateRenderer
) -> None:
    """Once, however often the call is made."""
    async with world(tmp_path, renderer, make_engine(renderer), keys=KEYS, followups=True) as w:
        name = {"x-millrace-session": "case"}
        first = await reply(w, **name)
        more = [USER, {"role": "assistant", "content": SAID}, {"role": "user", "content": "No, that is not 7."}]
        for _ in range(2):
            await reply(w, more, **name)
        (found,) = rewards(w)
    assert (found["source"], found["target"], found["target_kind"]) == ("followup", first, "turn")
    assert (found["value"], found["label"], found["confidence"]) == (-1.0, "corrected", 0.3)


async def test_a_weak_reward_counts_once_it_is_recorded(
    tmp_path: Path, renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a start counts them, which reads the log."""
    async with world(tmp_path, renderer, make_engine(renderer), keys=KEYS, followups=True) as w:
        name = {"x-millrace-session": "case"}
        await reply(w, **name)
        (session,) = w.gateway.sessions.live.values()
        written = w.gateway.recorder.record

        def full_for_rewards(of: Any, kind: str, *body: Any, **more: Any) -> str | None:
            if kind == "reward":
                w.log.max_waiting = 0
            return written(of, kind, *body, **more)

        monkeypatch.setattr(w.gateway.recorder, "record", full_for_rewards)
        await reply(w, [USER, {"role": "assistant", "content": SAID}, {"role": "user", "content": "Wrong."}], **name)
        assert (rewards(w), session.rewards) == ([], set())


async def test_nothing_is_read_into_messages_unless_it_is_asked_for(tmp_path: Path, renderer: TemplateRenderer) -> None:
    async with world(tmp_path, renderer, make_engine(renderer), keys=KEYS) as w:
        name = {"x-millrace-session": "case"}
        await reply(w, **name)
        await reply(w, [USER, {"role": "assistant", "content": SAID}, {"role": "user", "content": "Wrong."}], **name)
        assert rewards(w) == []
