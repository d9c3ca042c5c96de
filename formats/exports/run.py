"""`millrace export`: select, write, and say in a manifest what was written and what was not.

Invariants: under the name asked for lies everything or nothing, and wherever it lies its manifest lies beside it; every
trajectory that was read is counted in the manifest, and each refused one is a line of `NAME.refused.jsonl`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import orjson

from millrace.dialects.dialogue import Unsayable
from millrace.formats.clearance import TenantRules, anyone
from millrace.formats.exports.gather import ExportRefusal, ExportTally, Gatherer, Watch
from millrace.formats.exports.select import Selection
from millrace.formats.files import JsonLinesSink, digest, sink
from millrace.formats.layouts import WRITERS
from millrace.formats.layouts.base import ExportLayout
from millrace.formats.sample import ExportedSample
from millrace.infra import durable
from millrace.infra.config import Settings
from millrace.infra.connect import claims, history
from millrace.infra.errors import ExportError
from millrace.infra.log.history.reader import History
from millrace.schemas.json_values import JsonObject

FORMAT = 1
EXAMPLES = 5
"""refused trajectories of one reason that the summary names"""


@dataclass(frozen=True, slots=True)
class ExportSummary:
    """What became of every trajectory that was read; as the manifest has it."""

    format: int
    layout: str
    file: str
    namespace: str
    policy: str
    selection: JsonObject
    read: int
    left_out: dict[str, int]
    """by the rule of the selection"""
    refused: dict[str, int]
    """by reason"""
    examples: dict[str, list[str]]
    """by reason, some of the refused trajectories, with why"""
    gone: list[str]
    """ranges of the topics that neither they nor the archive have"""
    exported: int
    """trajectories"""
    rows: int
    tokens: int
    """of the exported trajectories' lineages"""
    trainable: int
    """of those, tokens that train"""
    tokenizers: list[str]
    """hashes of the tokenizers whose tokens these are"""
    digest: str
    """sha256 of the file; of a directory, over its files"""

    def as_json(self) -> JsonObject:
        """For programs."""
        return asdict(self)


def export(
    settings: Settings,
    layout: str,
    out: Path,
    selection: Selection,
    rules: TenantRules,
    watch: Watch = lambda done, total: None,
    *,
    accept_gaps: bool = False,
) -> ExportSummary:
    """Export trajectories of the configured policy. rules: what tenants' rules say today. Raises ExportError for a
    layout that is none, a place that is taken, or trajectories that nobody has any more, unless `accept_gaps`;
    BusError when the log cannot be read."""
    with history(settings) as bus:
        source = History(bus, settings.namespace, settings.policy.name, claims(settings).resolve)
        return export_from(
            source, layout, out, selection, settings.policy.tenant, rules, watch, accept_gaps=accept_gaps
        )


def export_from(
    history: History,
    layout: str,
    out: Path,
    selection: Selection,
    owner: str = "",
    rules: TenantRules = anyone,
    watch: Watch = lambda done, total: None,
    *,
    accept_gaps: bool = False,
) -> ExportSummary:
    """The same for any history. owner: the tenant whose the policy is; rules: what tenants' rules say today."""
    target = _layout(layout)
    if out.exists():
        raise ExportError(f"{out} is there already: remove it, or choose another name")
    if not out.parent.is_dir():
        raise ExportError(f"there is no folder {out.parent}: make it, or choose another name")
    with durable.drafting(out) as draft:
        with _Refusals(out) as refusals:
            run = _Run(history, target, selection, refusals)
            run.write(draft, owner, rules, watch, accept_gaps=accept_gaps)
        summary = run.summary(out, digest(draft))
        durable.write(_beside(out, "manifest.json"), orjson.dumps(summary.as_json(), option=orjson.OPT_INDENT_2))
    return summary


class _Run:
    """One export under way."""

    def __init__(self, history: History, layout: ExportLayout, selection: Selection, refusals: _Refusals) -> None:
        self._history = history
        self._layout = layout
        self._selection = selection
        self._tally = ExportTally()
        self._refusals = refusals
        self._rows = self._tokens = self._trainable = 0
        self._tokenizers: set[str] = set()
        self._gone: list[str] = []

    def write(self, draft: Path, owner: str, rules: TenantRules, watch: Watch, *, accept_gaps: bool) -> None:
        """Fill the draft. Raises ExportError where a part of what is selected is nowhere, unless `accept_gaps`."""
        gatherer = Gatherer(self._history, self._selection, owner, rules, self._tally, self._refusals)
        self._gone = gatherer.gone
        if self._gone and not accept_gaps:
            raise ExportError(f"{'; '.join(self._gone)}. --what-is-left exports that")
        target = sink(self._layout.form, self._layout.schema, draft)
        try:
            for group in gatherer.groups(watch):
                for samples, rows in self._layout.group(group, self._turn_down):
                    for row in rows:
                        target.write(row)
                    self._count(samples, len(rows))
        finally:
            target.close()

    def _count(self, samples: Sequence[ExportedSample], rows: int) -> None:
        self._rows += rows
        for sample in samples:
            self._tally.exports += 1
            self._tokens += sum(len(trace.tokens) for trace in sample.traces)
            self._trainable += sum(int((trace.mask != 0).sum()) for trace in sample.traces)
            self._tokenizers |= sample.tokenizers

    def _turn_down(self, sample: ExportedSample, error: Unsayable) -> None:
        self._tally.refusals[error.code] += 1
        self._refusals(ExportRefusal(sample.id, error.code, str(error), sample.place))

    def summary(self, out: Path, sha256: str) -> ExportSummary:
        """What the manifest says."""
        tally = self._tally
        return ExportSummary(
            FORMAT,
            self._layout.name,
            out.name,
            self._history.namespace,
            self._history.policy,
            self._selection.as_json(),
            tally.read,
            dict(sorted(tally.left_out.items())),
            dict(sorted(tally.refusals.items())),
            self._refusals.examples,
            self._gone,
            tally.exports,
            self._rows,
            self._tokens,
            self._trainable,
            sorted(self._tokenizers),
            sha256,
        )


class _Refusals:
    """Every refused trajectory as a line of a file beside the export, which is only there when there is one."""

    def __init__(self, out: Path) -> None:
        self._path = _beside(out, "refused.jsonl")
        self._held = ExitStack()
        self._lines: JsonLinesSink | None = None
        self.examples: dict[str, list[str]] = {}

    def __enter__(self) -> Self:
        self._path.unlink(missing_ok=True)  # of an export before, whose own file is gone
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._held.__exit__(kind, error, at)

    def __call__(self, refusal: ExportRefusal) -> None:
        if self._lines is None:
            self._lines = JsonLinesSink(self._held.enter_context(durable.drafting(self._path)))
            self._held.callback(self._lines.close)
        self._lines.write({**refusal._asdict(), "place": refusal.place._asdict()})
        some = self.examples.setdefault(refusal.reason, [])
        if len(some) < EXAMPLES:
            some.append(f"{refusal.trajectory}: {refusal.detail}")


def _layout(name: str) -> ExportLayout:
    layout = WRITERS.get(name)
    if layout is None:
        raise ExportError(f"there is no layout {name!r}: choose one of {', '.join(WRITERS)}")
    return layout()


def _beside(out: Path, suffix: str) -> Path:
    return out.with_name(f"{out.name}.{suffix}")
