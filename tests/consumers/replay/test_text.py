"""Text as samples: each reply trains once, behind its own prompt, and nothing that anybody else said does."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.consumers.replay import text
from millrace.consumers.replay.text import Texts, Writer, join_replies
from millrace.dialects import dialogue
from millrace.dialects.rendering import foreign_reply
from millrace.dialects.rendering.choose import choose
from millrace.dialects.rendering.foreign_reply import Speech
from millrace.infra.engines.upstream import UNTRAINABLE
from millrace.infra.errors import ConfigError
from millrace.infra.log.base import Record
from millrace.infra.log.history.rows import Row
from millrace.schemas import codec
from millrace.testing.events import model_call
from millrace.trainers.batches.sample import Sample
from tests.support import chat_tokenizer

Messages = Sequence[dict[str, Any]]
TOOL = {"role": "tool", "tool_call_id": "c", "content": "rain"}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
LOOKS = {"role": "assistant", "content": "Let me look.", "reasoning_content": "where?", "tool_calls": [CALL]}
SAYS = {"role": "assistant", "content": "It rains.", "reasoning_content": "wet"}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def call(name: str, messages: Messages, reply: Any, **changed: Any) -> Any:
    """A model call of text, as it lies in the log."""
    body = model_call(name, prompt=(), output=(), trainable=False)
    body |= {"untrainable_reason": UNTRAINABLE, "request": json.dumps({"messages": messages, "tools": TOOLS}).encode()}
    body |= {"response": json.dumps({"choices": [{"index": 0, "message": reply}]}).encode()} | changed
    event = {"id": name, "trajectory": "t", "kind": "model_call", "body": codec.encode_body("model_call", body)}
    return Row(Record("e", 0, 0, b"", b"", {}, 0), "Event", event, b"", "events")  # type: ignore[type-var]


def record(calls: Sequence[Any], status: str = "completed", reason: str = "") -> Any:
    """The sealed trajectory of some calls."""
    excluded = [f"{one.body['response_id']}:{reason or one.body['untrainable_reason']}" for one in calls]
    return {"id": "t", "group": "g", "status": status, "lineages": [], "excluded": excluded}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("forms")


@cache
def writer(folder: Path, forgetful: bool = False, longest: int = 4096, vocabulary: int = 4096) -> Writer:
    template = chat_tokenizer.FORGETFUL if forgetful else chat_tokenizer.TEMPLATE
    model = chat_tokenizer.write(folder / f"{forgetful}-{longest}-{vocabulary}", template)
    return Writer(lambda: choose(model, "auto"), vocabulary, longest)


def trained(of: Writer, sample: Sample) -> list[str]:
    """The stretches of text that train."""
    assert not isinstance(of.renderer, str)
    edges = np.flatnonzero(np.diff(np.r_[0, sample.mask, 0]))
    tokens = [sample.tokens[first:last].tolist() for first, last in zip(edges[::2], edges[1::2], strict=True)]
    return [of.renderer.tokenizer.decode(ids) for ids in tokens]  # type: ignore[attr-defined]


def conversation() -> list[Any]:
    """Two questions of a user, a tool between; the client tells also of a reply that nobody captured."""
    asked = [user("first"), {"role": "assistant", "content": "Never captured."}, user("What is the weather?")]
    after = [*asked, LOOKS, TOOL]
    last = [*after, SAYS, user("And now?")]
    return [call("a", asked, LOOKS), call("b", after, SAYS), call("c", last, {"role": "assistant", "content": "Sun."})]


THOUGHT = "<think>\nwhere?\n</think>\n\n"
LOOKED = 'Let me look.\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>'
RAINS = "<think>\nwet\n</think>\n\nIt rains.<|im_end|>"


def test_a_conversation_is_one_sample_where_the_form_goes_on_exactly(folder: Path) -> None:
    calls, of = conversation(), writer(folder)
    found = of.texts(record(calls), calls)
    (sample,) = found.samples
    assert trained(of, sample) == [THOUGHT + LOOKED, RAINS, "Sun.<|im_end|>"]
    assert (found.replies, found.refusals) == (3, Counter())
    assert set(sample.versions.tolist()) == {-1}
    assert set(sample.logprobs.tolist()) == {0.0}


def test_a_form_that_rewrites_history_makes_a_sample_of_each_reply(folder: Path) -> None:
    calls, of = conversation(), writer(folder, forgetful=True)
    found = of.texts(record(calls), calls)
    assert [trained(of, sample) for sample in found.samples] == [[THOUGHT + LOOKED], [RAINS], ["Sun.<|im_end|>"]]
    assert [sample.lineage for sample in found.samples] == [0, 1, 2]


def test_one_call_s_words_train_only_if_that_call_was_cleared(folder: Path) -> None:
    """A later call repeats what a withheld one said: as context, never as what is learned."""
    calls, of = conversation(), writer(folder)
    (sample,) = of.texts(record(calls), calls[1:]).samples
    assert trained(of, sample) == [RAINS, "Sun.<|im_end|>"]


IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"finish_reason": "length"}, dialogue.CUT),
        ({"finish_reason": "abort"}, dialogue.CUT),
        ({"finish_reason": "content_filter"}, dialogue.CUT),
        ({"request": json.dumps({"messages": [IMAGE]}).encode()}, f"{text.UNCHAT} (not_text)"),
        ({"request": b"\xff"}, f"{text.UNCHAT} (no_messages)"),
        ({"response": b'{"choices": [{"index": 0, "message": {"content": " "}}]}'}, dialogue.EMPTY_REPLY),
        ({"response": b'{"choices": [{"index": 0, "message": {"content": "<tool_call>"}}]}'}, None),
        ({"response": b'{"choices": [{"index": 0, "message": {"content": "a<|im_end|>"}}]}'}, foreign_reply.MISREAD),
        ({"untrainable_reason": "aborted"}, ""),
        ({"untrainable_reason": "withheld:secret"}, ""),
        ({"trainable": True}, ""),
    ],
)
def test_what_may_not_be_imitated_is_passed_over_by_name(folder: Path, changed: Any, why: str | None) -> None:
    one = call("a", [user("x")], SAYS, **changed)
    found = writer(folder).texts(record([one]), [one])
    if why is None:  # text that looks like a mark: whatever it is, it is what was said, or it is refused
        assert found.replies + found.refusals.total() == 1
        return
    assert (found.samples, found.refusals) == ([], Counter([why] if why else []))


def test_a_reply_counts_once_and_not_where_another_took_its_place(folder: Path) -> None:
    first, again = call("a", [user("x")], SAYS), call("b", [user("x")], SAYS)
    assert writer(folder).texts(record([first, again]), [first, again]).replies == 1
    other = call("b", [user("x")], LOOKS, supersedes="a")
    found = writer(folder).texts(record([first, other]), [first, other])
    assert (found.replies, found.refusals) == (1, Counter([text.HAS_SUCCESSOR]))


def test_what_took_it_out_of_its_sample_takes_it_out_of_text(folder: Path) -> None:
    one = call("a", [user("x")], SAYS)
    assert writer(folder).texts(record([one], reason="other_policy"), [one]) == Texts()
    assert writer(folder).texts(record([one], status="failed"), [one]) == Texts()


def test_nothing_of_a_flawed_attempt_is_imitated(folder: Path) -> None:
    one = call("a", [user("x")], SAYS)
    sealed = record([one])
    assert writer(folder).texts(sealed, [one]).replies == 1
    assert writer(folder).texts({**sealed, "excluded": [*sealed["excluded"], "*:gap"]}, [one]) == Texts()


def test_what_the_model_cannot_take_is_passed_over(folder: Path) -> None:
    one = call("a", [user("x")], SAYS)
    for of, why in (
        (writer(folder, longest=20), foreign_reply.TOO_LONG),
        (writer(folder, vocabulary=9), text.UNKNOWN_ID),
    ):
        assert of.texts(record([one]), [one]).refusals == Counter([why])

    def none() -> Any:
        raise ConfigError("it has no chat template")

    assert Writer(none, 9, 9).texts(record([one]), [one]).refusals == Counter(["it has no chat template"])


END = 9
IDS = st.lists(st.integers(0, 2), min_size=1, max_size=4)
GROWN = st.lists(st.tuples(st.integers(-1, 6), IDS, IDS), max_size=8)


@given(GROWN)
def test_every_reply_trains_once_behind_its_own_prompt(turns: Any) -> None:
    """However conversations go on, branch and come again: prompts that are new, or go on from any earlier reply."""
    replies: list[Speech] = []
    for back, prompt, reply in turns:
        past = replies[back] if 0 <= back < len(replies) else Speech([], [])
        replies.append(Speech([*past.prompt, *past.reply, *prompt], [*reply, END]))
    found = join_replies(replies)
    left = Counter({(tuple(one.prompt), tuple(one.reply)): 1 for one in replies})
    for tokens, mask, count in found:
        assert len(tokens) == len(mask)
        at = 0
        for _ in range(count):
            at = mask.index(1, at)
            size = tokens.index(END, at) + 1 - at
            said = tuple(tokens[:at]), tuple(tokens[at : at + size])
            assert all(mask[at : at + size])
            left[said] -= 1
            at += size
        assert not any(mask[at:])
    assert set(left.values()) <= {0}
