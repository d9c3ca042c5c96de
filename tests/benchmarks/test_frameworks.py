"""The table of frameworks: its script, its verdicts, and the programs that run without an environment of their own.

`benchmarks.frameworks` installs every framework, which no test does."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.frameworks.__main__ import ENVIRONMENTS, HEAD, PROGRAMS, last_line, main
from benchmarks.frameworks.judge import ROUTES, ends_well, judge
from benchmarks.frameworks.script import CALLS, FIRST_ANSWER, LAST_ANSWER, SECOND, fields, native, step
from millrace.dialects.all import of_path
from millrace.schemas.arrays import pack
from tests.support.documents import ROOT
from tests.support.upstream_answers import WHOLE
from tests.support.wire import Exchange

QUESTIONS = ["What is 3 + 4, and what is 5 + 6?", "sum=7", "sum=11", SECOND, "product=77"]
SAID = {"answers": [FIRST_ANSWER, LAST_ANSWER], "calls": CALLS}


def test_the_script_follows_the_conversation() -> None:
    stands = [step(" ".join(QUESTIONS[:length])) for length in range(6)]
    assert stands == ["idle", "ask", "ask", "answer", "ask_again", "answer_again"]
    assert native(QUESTIONS[0]).count("<tool_call>") == 2
    assert '"name": "calc__add"' in native(f'{{"name": "calc__add"}} {QUESTIONS[0]}')


def test_fields_are_asked_for_one_call_at_a_time() -> None:
    prompt = f"[[ ## next_tool_name ## ]] [[ ## question ## ]] {QUESTIONS[0]}"
    assert '{"a": 3.0, "b": 4.0}' in fields(prompt)
    assert '{"a": 5.0, "b": 6.0}' in fields(f"{prompt} sum=7")
    assert "finish" in fields(f"{prompt} sum=7 sum=11")


@given(st.permutations(CALLS), st.integers(0, 2), st.booleans())
def test_only_what_was_scripted_ends_well(calls: list[Any], at: int, repeat: bool) -> None:
    assert ends_well({"answers": SAID["answers"], "calls": calls})
    wrong = [*calls, calls[at]] if repeat else calls[:at] + calls[at + 1 :]
    assert not ends_well({"answers": SAID["answers"], "calls": wrong})
    assert not ends_well({"answers": SAID["answers"][:1], "calls": calls})


TOKENS = st.lists(st.integers(0, 9), min_size=1, max_size=4)


def asked_and_said(path: str, number: int, streamed: bool) -> tuple[bytes, bytes, bytes]:
    """A request whose client asks for no thoughts, the response of its record, and what came back."""
    asked = {"/v1/responses": {"input": []}}.get(path, {"messages": [], "max_tokens": 9})
    request = orjson.dumps({"model": "m", "user": str(number), **asked})
    whole = {**WHOLE[of_path(path).name], "id": f"r{number}"}
    match path:
        case "/v1/chat/completions":
            whole["choices"] = whole["choices"][:1]
            (choice,) = whole["choices"]
            delta = {**choice["message"], "tool_calls": [{"index": 0, **choice["message"]["tool_calls"][0]}]}
            events = [{"delta": delta}, {"delta": {}, "finish_reason": choice["finish_reason"]}]
            told = [{"id": whole["id"], "choices": [{"index": 0, **event}]} for event in events]
            shown = whole
        case "/v1/messages":
            shown = {**whole, "content": whole["content"][1:]}
            text, tool = shown["content"]
            told = [
                {"type": "message_start", "message": {**whole, "content": [], "stop_reason": None}},
                {"type": "content_block_start", "index": 0, "content_block": {**text, "text": ""}},
                {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text["text"]}},
                {"type": "content_block_start", "index": 1, "content_block": tool},
                {"type": "message_delta", "delta": {"stop_reason": whole["stop_reason"]}, "usage": whole["usage"]},
            ]
        case _:
            shown, told = whole, [{"type": "response.completed", "response": whole}]
    stream = b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in told)
    return request, orjson.dumps(whole), stream if streamed else orjson.dumps(shown)


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[Exchange], list[dict[str, Any]], list[Any]]:
    """Conversations of several lineages, as the witness, the log and the engine have them."""
    seen, events, asked = [], [], []
    lineages: dict[str, tuple[int, ...]] = {}
    for number in range(draw(st.integers(1, 4))):
        lineage = draw(st.sampled_from("ab"))
        kept = draw(st.integers(0, len(lineages.get(lineage, ()))))
        new, output = draw(TOKENS), draw(TOKENS)
        prompt = (*lineages.get(lineage, ())[:kept], *new)
        lineages[lineage] = (*prompt, *output)
        asked.append((prompt, tuple(output)))
        path, streamed = draw(st.sampled_from(sorted(ROUTES))), draw(st.booleans())
        request, reply, said = asked_and_said(path, number, streamed)
        seen.append(Exchange("POST", path, 200, request, said, streamed))
        data = {"lineage": lineage, "prefix_len": kept, "opened": None, "request": request, "response": reply}
        ids = {"prompt_ids": pack(new, "int32"), "output_ids": pack(output, "int32")}
        data |= {**ids, "trainable": True, "untrainable_reason": None}
        events.append({"kind": "model_call", "trajectory": "t", "root_trajectory": "t", "data": data})
    return seen, events, asked


@settings(max_examples=50)
@given(runs(), st.sampled_from(["call", "token", "byte", "reply", "said", "cut", "root", "trainable"]), st.data())
def test_the_verdict_finds_whatever_is_amiss(run: Any, harm: str, data: st.DataObject) -> None:
    seen, events, asked = run
    assert judge(seen, events, asked, SAID).clean
    at = data.draw(st.integers(0, len(events) - 1))
    call = events[at]["data"]
    if harm == "call":
        del events[at]
        assert not judge(seen, events, asked, SAID).kept
    elif harm == "token":
        asked[at] = (asked[at][0], (*asked[at][1], 1))
        assert not judge(seen, events, asked, SAID).exact
    elif harm == "byte":
        call["request"] += b" "
        assert not judge(seen, events, asked, SAID).wire
    elif harm == "reply":
        call["response"] = call["response"].replace(b'"x"', b'"y"')
        assert not judge(seen, events, asked, SAID).wire
    elif harm in ("said", "cut"):
        said = seen[at].said
        seen[at].said = said.replace(b'"x"', b'"y"') if harm == "said" else said[: len(said) // 2]
        assert not judge(seen, events, asked, SAID).wire
    elif harm == "root":
        events.append({**events[at], "root_trajectory": "other"})
        assert judge(seen, events, asked, SAID).roots == 2
    elif harm == "trainable":
        call |= {"trainable": False, "untrainable_reason": "constrained"}
        assert judge(seen, events, asked, SAID).trouble == "not trainable: constrained"


def test_a_program_that_fails_says_why() -> None:
    refusal = json.dumps({"error": {"message": "no such thing"}}).encode()
    row = judge([Exchange("POST", "/v1/messages", 400, b"", refusal, False)], [], [], None)
    assert (row.finished, row.api, row.trouble) == (False, "Messages", "400 no such thing")
    assert judge([], [], [], None, "ImportError: x").trouble == "ImportError: x"
    assert last_line(b'noise\n{"answers": [], "calls": []}\n') == {"answers": [], "calls": []}
    assert last_line(b"noise") is None


def test_every_program_is_there_and_every_environment_is_on_the_page() -> None:
    assert {one.program for one in ENVIRONMENTS} | {"talk.py"} == {path.name for path in PROGRAMS.glob("*.*")}
    page = (ROOT / "docs" / "frameworks.md").read_text()
    for one in ENVIRONMENTS:
        assert f"| {one.name} " in page, one.name
    assert HEAD in page


@pytest.mark.slow
def test_a_program_holds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["frameworks", "--here", "--only", "OpenAI SDK"])
    main()
    (row,) = [row for row in capsys.readouterr().out.splitlines() if "OpenAI SDK" in row]
    assert [column.strip() for column in row.split("|")[2:-1]] == [
        "chat",
        "4",
        "yes",
        "yes",
        "1",
        "1",
        "yes",
        "yes",
        "",
    ]
