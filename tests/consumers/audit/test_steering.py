"""Whatever the strings of a log hold, neither `audit` nor `why` lets a character through that a terminal obeys."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from io import StringIO

import pytest

from millrace.consumers.audit.command import render
from millrace.consumers.tell.command import explain_in
from millrace.consumers.tell.story import tell
from millrace.consumers.tell.subject import find
from millrace.consumers.tell.topics import PolicyTopics
from millrace.consumers.tell.trees import story_tree
from millrace.infra.log.history.rows import as_stored
from millrace.infra.terminal import Terminal
from millrace.testing.world import NAMESPACE
from tests.consumers.audit.corruptions.generator import altered_strings
from tests.support.players import POLICY
from tests.support.whole import KINDS, Whole, whole

STEERING = "\x1b]52;c;aGk=\x07\x1b[2J\x9b31m\x85\x7f\r\x08\u202e\u2066\u2028\x00"
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@cache
def steered(kind: str) -> Whole:
    """A history whose records of one kind of topic hold such characters in every string, key and header."""
    history = whole(0).copy()
    for record in list(history.records(kind)):
        value = altered_strings(record, STEERING)
        headers = {name: data + STEERING.encode() for name, data in record.headers.items() if name != "turn"}
        changed = replace(
            record, value=value, key=record.key + STEERING.encode(), headers={**record.headers, **headers}
        )
        history.bus.logs[record.topic][record.partition].entries[record.offset] = changed
    return history


@pytest.mark.parametrize("kind", KINDS)
def test_an_audit_prints_no_control_character(kind: str) -> None:
    report = steered(kind).audit()
    out = StringIO()
    Terminal(file=out, width=200).print(render(report, 200), highlight=False)
    assert not report.clean
    assert not OBEYED.search(out.getvalue())


@pytest.mark.parametrize("kind", ["raw", "events", "grants", "prompts", "trajectories", "resolutions", "dead-letters"])
def test_why_prints_no_control_character(kind: str) -> None:
    history = steered(kind)
    wanted = {STEERING, "0"}
    for _, row in history.rows(kind)[:3]:
        wanted |= {
            str(row[name]) for name in ("id", "group", "trajectory", "prompt_id", "attempt", "ticket") if name in row
        }
    for name in sorted(wanted):
        for width in (None, 80):
            text = explain_in(PolicyTopics(history.bus, NAMESPACE, POLICY), name, width=width).text
            assert not OBEYED.search(text), (kind, name)
        topics = PolicyTopics(history.bus, NAMESPACE, POLICY, as_stored)
        if (subject := find(topics, name)) is not None:
            out = StringIO()
            Terminal(file=out, width=200, force_terminal=True).print(story_tree(tell(topics, subject)))
            assert not OBEYED.search(re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())), (kind, name)
