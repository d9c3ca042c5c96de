"""The account of a trajectory as one HTML page.

Invariants: no script and no link to anywhere; everything that a record says is escaped, and control characters and
those that change the direction of text show as pictures, so that no text is ever more than text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from millrace.consumers.report.page import decimal, moment
from millrace.consumers.trajectory.account import Account
from millrace.consumers.trajectory.tokens import Spell, TokenRun, spelled
from millrace.consumers.trajectory.tree import facts, trained
from millrace.infra.terminal import clean

TEMPLATE = "page.html.jinja"
SERIES = 8
"""colours of versions, in turn"""


def render(account: Account, spell: Spell | None = None) -> str:
    """The whole page. spell: the text of a token; without it tokens are numbers."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_harmless,
    )
    filters: dict[str, Callable[..., Any]] = {"moment": moment, "decimal": decimal}
    environment.filters.update(filters)

    def tokens(run: TokenRun) -> list[tuple[str, str]]:
        """(text, what the mouse tells) of each token."""
        made = "read" if run.version is None else f"version {run.version}"
        logprobs = [*(f", logprob {one:.3f}" for one in run.logprobs), *[""] * len(run.tokens)]
        texts = spelled(run, spell)
        return [
            (text if spell is not None else f"{text} ", f"token {id}, {made}, {run.weight}{logprob}")
            for text, id, logprob in zip(texts, run.tokens, logprobs, strict=False)
        ]

    return environment.get_template(TEMPLATE).render(
        found=account, facts=facts(account), trained=trained(account), tokens=tokens, series=series
    )


def series(run: TokenRun) -> str:
    """The classes of a run's tokens: its weight, and the colour of its version."""
    colour = "" if run.version is None else f" c{run.version % SERIES + 1}"
    return f"{run.weight.replace(' ', '-')}{colour}"


def _harmless(value: Any) -> Any:
    """What an expression of the template puts into the page."""
    if isinstance(value, Markup):
        return Markup(clean(str(value)))
    return Markup(clean(str(escape(value)))) if isinstance(value, str) else value
