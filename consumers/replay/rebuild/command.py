"""`millrace replay rebuild`: which topics, what they came to, an exit code."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.text import Text

from millrace.consumers.audit.command import progress, spot
from millrace.consumers.audit.folds import production
from millrace.consumers.replay.rebuild.law import WRITERS, Difference, TopicTally
from millrace.consumers.replay.rebuild.run import RebuildReport, RebuildRequest, rebuild
from millrace.infra.config import Settings
from millrace.infra.connect import claims, history
from millrace.infra.errors import ConfigError
from millrace.infra.log.topics import full_name
from millrace.infra.terminal import RowTable, Terminal, put_json

MOST_LINES = 10
"""differences printed in full"""
COLUMNS = ("records", "equal", "different", "missing", "additional", "forgotten", "untried")


def run(settings: Settings, topics: Sequence[str], out: Path | None = None, *, as_json: bool = False) -> int:
    """Make topics of the configured policy again. 0: every record is equal; 1: one is not, or could not be compared.

    Raises ConfigError for a topic that no stage writes, ReplayError for one whose sources are nowhere."""
    kinds = kinds_of(topics, settings.namespace, settings.policy.name)
    request = RebuildRequest(kinds, bool(topics), settings.topics.slots, settings.topics.shards, out)
    with ExitStack() as stack:
        bus = stack.enter_context(history(settings))
        watch = stack.enter_context(progress(Terminal(stderr=True)))
        store = claims(settings)
        report = rebuild(
            bus,
            settings.namespace,
            settings.policy.name,
            production(settings, stack),
            request,
            release=settings.policy.release,
            resolve=store.resolve,
            claims=store,
            watch=watch,
        )
    console = Terminal()
    if as_json:
        put_json(as_values(report))
    else:
        show(console, report, out)
    return 0 if report.equal else 1


def kinds_of(topics: Sequence[str], namespace: str, policy: str) -> tuple[str, ...]:
    """Kinds of the topics that are asked for, by any of their names; all without one. Raises ConfigError."""
    names = {name: kind for kind in WRITERS for name in (kind, f"{policy}.{kind}")}
    names |= {full_name(namespace, name): kind for name, kind in names.items()}
    unknown = [topic for topic in topics if topic not in names]
    if unknown:
        raise ConfigError(
            f"{', '.join(unknown)}: no stage of policy {policy} writes that. Name some of {', '.join(WRITERS)}"
        )
    return tuple(dict.fromkeys(names[topic] for topic in topics)) or tuple(WRITERS)


def as_values(report: RebuildReport) -> dict[str, Any]:
    """For programs."""
    rows = {}
    for kind, tally in report.tallies.items():
        row = asdict(tally)
        for one in row["differences"]:
            one["place"] = one["place"] and one["place"]._asdict()
        rows[report.topics[kind]] = row
    return {
        "equal": report.equal,
        "turns": report.turns,
        "topics": rows,
        "refused": {report.topics[kind]: why for kind, why in report.refusals.items()},
        "notes": report.notes,
        "faults": report.faults,
        "written": {report.topics[kind]: one._asdict() for kind, one in report.outputs.items()},
    }


def show(console: Terminal, report: RebuildReport, out: Path | None) -> None:
    """The table, what is refused, the first differences, and the verdict."""
    table = RowTable(
        box=box.SIMPLE_HEAD, pad_edge=False, title=f"{report.turns:,} turns folded again", title_justify="left"
    )
    table.add_column("topic", no_wrap=True)
    for name in COLUMNS:
        table.add_column("not compared" if name == "untried" else name, justify="right")
    for kind, tally in report.tallies.items():
        table.add_row(report.topics[kind], *(f"{getattr(tally, name):,}" for name in COLUMNS))
    console.print(table)

    def say(text: str, style: str = "") -> None:
        console.print(Text(text, style), highlight=False, soft_wrap=True)

    for kind, why in report.refusals.items():
        say(f"{report.topics[kind]} cannot be made again: {why}", "yellow")
    for note in report.notes:
        say(f"note: {note}", "dim")
    for fault in report.faults[:MOST_LINES]:
        say(fault, "bold red")
    differences = [(kind, one) for kind, tally in report.tallies.items() for one in tally.differences]
    for kind, one in differences[:MOST_LINES]:
        say(f"{_where(report.topics[kind], one)}: {one.what}")
    more = sum(_count(tally) for tally in report.tallies.values()) - min(len(differences), MOST_LINES)
    if more > 0:
        say(f"... and {more:,} more; --json lists what was kept", "dim")
    for kind, output in report.outputs.items():
        remark = (
            f", {output.estimated:,} of them at offsets that nobody names, so their order is guessed"
            if output.estimated
            else ""
        )
        say(f"{report.topics[kind]}: {output.records:,} records -> {out}{remark}")
    if report.equal:
        say("equal: every record is what its turn gives", "bold green")
    else:
        say("not equal" if any(map(_count, report.tallies.values())) else "not all could be compared", "bold red")


def _count(tally: TopicTally) -> int:
    return tally.different + tally.missing + tally.additional


def _where(topic: str, one: Difference) -> str:
    place = spot(one.place) if one.place else topic
    return f"{place} (turn {one.turn})" if one.turn else place
