"""The tree and the page: all of the account, and no text of the log is ever more than text."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from io import StringIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.consumers.tell.account import Account, facts, training_lines
from millrace.consumers.tell.command import account_of
from millrace.consumers.tell.pages import account_page, series
from millrace.consumers.tell.topics import PolicyTopics
from millrace.consumers.tell.trees import account_tree
from millrace.infra.log.history.rows import as_stored
from millrace.infra.terminal import Terminal, clean
from tests.support.conversations import Conversations
from tests.support.history_log import NS
from tests.support.history_records import POLICY

HOSTILE = (
    "<script>alert(1)</script>",
    "</pre></div><img src=x onerror=alert(1)>",
    "\x1b]0;title\x07\x1b[31mred\x9b2J",
    "[bold red]markup[/] [link=http://x]y[/link]",
    "{{ 7 * 7 }} {% raw %} {# #}",
    "\u202egnp.exe\u2066",
    "\" onmouseover='x' &amp; &#x3c;",
    "\ud800 half a pair",
    "<!-- --> <![CDATA[ ]]> ]]>",
)


@cache
def base() -> Account:
    source = Conversations(5)
    wanted = source.rows("trajectories")[6][1]["id"]
    return account_of(PolicyTopics(source.bus, NS, POLICY, as_stored), wanted)


def with_text(text: str) -> Account:
    """The account with a text in every place that a record may fill."""
    found = base()
    turn = replace(found.branches[0].turns[1], line=text, said=((text, text),), notes=(text,))
    branch = replace(found.branches[0], id=text, parent=text, turns=(turn,))
    reward = replace(found.rewards[0], source=text, rubric=text, target=text, detail=text, critique=text, fate=text)
    lineage = replace(found.lineages[0], id=text)
    broken = replace(lineage, runs=(), unreadable=text)
    trained = replace(found.trained[0], lost=text, batch={text: 1.0})
    return replace(
        found,
        id=text,
        task=text,
        verdict=text,
        attempt=text,
        branches=(branch, branch),
        rewards=(reward,),
        lineages=(lineage, broken),
        trained=(trained,),
        excluded=(text,),
        missing=(text,),
    )


class Reader(HTMLParser):
    """What a browser would see."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    return reader


@cache
def plain() -> Reader:
    """The page with harmless words in every place."""
    return read(account_page(with_text("word"), lambda token: "word"))


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_only_text_in_the_page(text: str) -> None:
    html = account_page(with_text(text), lambda token: text)
    html.encode()
    found = read(html)
    assert (found.tags, found.attributes) == (plain().tags, plain().attributes)
    assert found.text.count(clean(text)) > 20


@settings(max_examples=40)
@given(st.text(st.characters(), min_size=1, max_size=40))
def test_no_text_adds_an_element_or_a_control_character(text: str) -> None:
    html = account_page(with_text(text), lambda token: text)
    html.encode()
    found = read(html)
    assert (found.tags, found.attributes) == (plain().tags, plain().attributes)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", html)


@settings(max_examples=40)
@given(st.text(st.characters(), max_size=40) | st.sampled_from(HOSTILE))
def test_no_text_reaches_a_terminal_as_a_command(text: str) -> None:
    for tokens in (False, True):
        out = StringIO()
        console = Terminal(file=out, width=200, force_terminal=False, no_color=True)
        console.print(account_tree(with_text(text), tokens=tokens, spell=lambda token: text), highlight=False)
        shown = out.getvalue()
        shown.encode()
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", shown)


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    html = account_page(base())
    found = read(html)
    assert not {"script", "link", "img", "iframe", "object", "a", "form"} & found.tags
    assert not re.search(r"https?://|url\(|@import", html)
    assert "default-src 'none'" in html


def test_tree_and_page_tell_the_same() -> None:
    out = StringIO()
    Terminal(file=out, width=400).print(account_tree(base()), highlight=False)
    shown, html = out.getvalue(), read(account_page(base())).text
    texts = [text for branch in base().branches for turn in branch.turns for _, text in turn.said]
    texts += [turn.line for branch in base().branches for turn in branch.turns]
    texts += [base().verdict, base().lineages[0].id, *facts(base()), *training_lines(base())]
    assert len(texts) > 20
    for text in texts:
        assert text in shown
        assert text in html


def test_every_token_is_shown_with_what_it_weighs() -> None:
    html = account_page(base(), lambda token: f"<{token}>")
    for run in base().lineages[0].runs:
        assert series(run) in html
        for token in run.tokens:
            assert f"&lt;{token}&gt;" in html
    out = StringIO()
    Terminal(file=out, width=400, force_terminal=True).print(account_tree(base(), tokens=True), highlight=False)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    line = " ".join(str(token) for run in base().lineages[0].runs for token in run.tokens)
    assert line in shown
