"""`millrace audit`: read the topics, print the table of laws, answer with an exit code."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rich import box
from rich.console import Group
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from millrace.consumers.audit.folds import production
from millrace.consumers.audit.law import AuditReport, LawFinding, Violation
from millrace.consumers.audit.run import audit
from millrace.consumers.audit.walk import Watch
from millrace.infra.config import Settings
from millrace.infra.connect import claims, history
from millrace.infra.log.base import Place
from millrace.infra.terminal import PIPE_COLUMNS, RowTable, Terminal, put_json

WIDE = 130
"""columns from which on laws are written out"""
EVERY_S = 10.0
"""between two lines about how far an audit is, where no terminal shows it"""
PRINT_LIMIT = 10
"""violations printed in full"""


def run(settings: Settings, files: bool = False, as_json: bool = False, quick: bool = False) -> int:
    """Audit the configured policy. 0: every law holds; 1: at least one is broken. quick: fold nothing again.

    Raises AuditError when there is nothing to audit, BusError when the log cannot be read."""
    began = time.process_time()
    report = report_of(settings, files, quick)
    Terminal(stderr=True).print(cost(report, time.process_time() - began), style="dim", highlight=False)
    if as_json:
        put_json(report.as_json())
    else:
        console = Terminal()
        console.print(render(report, console.width), highlight=False)
    return 0 if report.clean else 1


def report_of(settings: Settings, files: bool = False, quick: bool = False) -> AuditReport:
    """What the audit of the configured policy finds. Raises as `run` does."""
    with ExitStack() as stack:
        bus = stack.enter_context(history(settings))
        watch = stack.enter_context(progress(Terminal(stderr=True), lines=True))
        return audit(
            bus,
            settings.namespace,
            settings.policy.name,
            release=settings.policy.release,
            resolve=claims(settings).resolve,
            files=files,
            makers=None if quick else production(settings, stack),
            root=settings.weights,
            watch=watch,
        )


@contextmanager
def progress(console: Terminal, *, lines: bool = False) -> Iterator[Watch]:
    """Shows on a terminal what is being read and how far it is; elsewhere, with `lines`, it prints a line at once
    and then now and then, so that a long audit is never silent."""
    if not console.is_terminal:
        yield _lines(console) if lines else lambda activity, done, total: None
        return
    columns = (TextColumn("{task.description:<28}"), BarColumn(bar_width=30), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("looking at the topics", total=None)
        yield lambda activity, done, total: bar.update(task, description=activity, completed=done, total=max(total, 1))


def _lines(console: Terminal) -> Watch:
    """Prints what is being done and how far it is, once every EVERY_S seconds at most."""
    next_s = time.monotonic()

    def watch(activity: str, done: int, total: int) -> None:
        nonlocal next_s
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + EVERY_S
            console.print(f"audit: {activity}, {done:,} of {total:,}", highlight=False, soft_wrap=True)

    return watch


def cost(report: AuditReport, cpu_s: float) -> str:
    """What an audit cost, in words: the CPU time of this process for each thousand events."""
    events = report.records.get("events", 0)
    price = f", {cpu_s * 1000 / events:.2f} s for a thousand events" if events else ""
    return f"audit: {cpu_s:.1f} s of CPU for {sum(report.records.values()):,} records{price}"


def render(report: AuditReport, width: int = WIDE) -> Group:
    """The report for a terminal of `width` columns: the table (laws in full only where there is room), what could not
    be checked, the violations with their records."""
    wide = width >= WIDE
    title = f"audit of policy {report.policy} in {report.namespace}: {sum(report.records.values()):,} records"
    table = RowTable(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.expand = width < PIPE_COLUMNS
    table.add_column("", width=1)
    table.add_column("law", no_wrap=True)
    if wide:
        table.add_column("what must hold", ratio=2)
    table.add_column("checked", justify="right", no_wrap=True)
    # Narrow: one line a law, cut rather than broken into words one above another.
    table.add_column("found", style="dim", ratio=1, no_wrap=not wide, overflow="fold" if wide else "ellipsis")
    for finding in report.findings:
        table.add_row(*_row(finding, wide=wide))
    parts: list[RowTable | Text] = [table]
    parts += [Text(f"note: {note}", style="dim") for note in report.notes]
    parts += [Text(f"note on {f.law}: {note}", style="dim") for f in report.findings for note in f.notes]
    for number, violation in enumerate(report.violations[:PRINT_LIMIT]):
        parts.append(_violation(violation, first=number == 0))
    count = sum(finding.broken for finding in report.findings)
    if count > PRINT_LIMIT:
        parts.append(Text(f"... and {count - PRINT_LIMIT} more; --json lists what was kept", style="dim"))
    verdict = ("clean: every law holds", "bold green") if report.clean else (f"{count} violations", "bold red")
    return Group(*parts, Text(*verdict))


def _row(finding: LawFinding, *, wide: bool) -> tuple[Text | str, ...]:
    sign = Text("✓", "green") if finding.holds else Text("✗", "bold red")
    facts = [f"{value:,} {name}" for name, value in finding.facts.items()]
    count = [f"{finding.broken:,} violations"] if finding.broken else []
    sentence = [finding.sentence] if wide else []
    return sign, finding.law, *sentence, f"{finding.checked:,} {finding.unit}", ", ".join([*count, *facts])


def _violation(violation: Violation, *, first: bool) -> Text:
    text = Text("first violation: " if first else "violation: ", "bold red")
    text.append(f"{violation.law}: {violation.message}\n", "default")
    names = ", ".join(f"{name} {value}" for name, value in violation.ids.items())
    if names:
        text.append(f"    {names}\n", "default")
    for place in violation.records:
        text.append(f"    at {spot(place)}\n", "cyan")
    text.rstrip()
    return text


def spot(place: Place) -> str:
    """A place as people write it: topic[partition]@offset."""
    return f"{place.topic}[{place.partition}]@{place.offset}"
