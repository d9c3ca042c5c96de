"""The pages: the report of a policy, with its charts and the audit, and the account of a trajectory, each in one file
that loads nothing.

Invariants: no script and no link to anywhere; everything that a record says is escaped, and on the page of a trajectory
control characters and those that change the direction of text show as pictures, so that no text is ever more than
text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from millrace.consumers.audit import AuditReport
from millrace.consumers.audit.command import spot
from millrace.consumers.tell import notation
from millrace.consumers.tell.account import Account, Spell, TokenRun, facts, texts_of, training_lines
from millrace.consumers.tell.summary import Summary
from millrace.infra.terminal import clean

MOST_VERSIONS = 300
"""newest versions listed one by one"""
SERIES = 8
"""colours of versions, in turn"""


def report_page(summary: Summary, report: AuditReport) -> str:
    """The whole page of a policy."""
    from millrace.consumers.tell.charts import draw

    charts = {name: (Markup(chart.svg), chart.legend) for name, chart in draw(summary).items()}
    return _page("report.html.jinja", found=summary, charts=charts, report=report, shown=MOST_VERSIONS)


def account_page(account: Account, spell: Spell | None = None) -> str:
    """The whole page of a trajectory. spell: the text of a token; without it tokens are numbers."""

    def tokens(run: TokenRun) -> list[tuple[str, str]]:
        """(text, what the mouse tells) of each token."""
        origin = "read" if run.version is None else f"version {run.version}"
        logprobs = [*(f", logprob {one:.3f}" for one in run.logprobs), *[""] * len(run.tokens)]
        return [
            (text if spell is not None else f"{text} ", f"token {id}, {origin}, {run.weight}{logprob}")
            for text, id, logprob in zip(texts_of(run, spell), run.tokens, logprobs, strict=False)
        ]

    return _page(
        "trajectory.html.jinja",
        _harmless,
        found=account,
        facts=facts(account),
        trained=training_lines(account),
        tokens=tokens,
        series=series,
    )


def _page(template: str, finalize: Callable[[Any], Any] | None = None, **values: Any) -> str:
    """A template with values. finalize: what is done to each value that goes into it."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=finalize,
    )
    for name in ("moment", "clock", "decimal", "duration", "spans"):
        environment.filters[name] = getattr(notation, name)
    environment.filters.update({"number": "{:,}".format, "spot": spot, "member": notation.short_name})
    return environment.get_template(template).render(values)


def series(run: TokenRun) -> str:
    """The classes of a run's tokens: its weight, and the colour of its version."""
    colour = "" if run.version is None else f" c{run.version % SERIES + 1}"
    return f"{run.weight.replace(' ', '-')}{colour}"


def _harmless(value: Any) -> Any:
    """What an expression of the template puts into the page."""
    if isinstance(value, Markup):
        return Markup(clean(str(value)))
    return Markup(clean(str(escape(value)))) if isinstance(value, str) else value
