"""The charts of the page, as SVG that takes its colours and its font from it. Pure: values in, SVG out.

Invariants: no global state of matplotlib is touched; the same figure gives the same bytes; ids inside one figure occur
in no other of the page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from millrace.consumers.tell.notation import short_name
from millrace.consumers.tell.summary import SECOND, CommittedVersion, FunnelStage, Summary
from millrace.schemas import bounds

SERIES = ("c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8")
_NAMES = ("fg", "muted", "grid", "card", *SERIES)
COLOUR = {name: f"#0102{at:02x}" for at, name in enumerate(_NAMES)}
"""stand-ins that `finish` turns into the page's own colours, for light and dark alike"""

_RC: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.size": 8.5,
    "axes.edgecolor": COLOUR["grid"],
    "axes.labelcolor": COLOUR["muted"],
    "axes.labelsize": 8.5,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": COLOUR["grid"],
    "grid.linewidth": 0.6,
    "xtick.color": COLOUR["muted"],
    "ytick.color": COLOUR["muted"],
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "text.color": COLOUR["fg"],
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
}


class Drawing:
    """One figure being draw: `with Drawing("reward", 11, 3) as d: d.axes.plot(...)`, then `d.svg`."""

    def __init__(self, name: str, width: float, height: float, rows: int = 1) -> None:
        settings: Any = {**_RC, "svg.hashsalt": name}
        self._context = rc_context(settings)
        self._name = name
        self._size = (width, height)
        self._rows = rows
        self.svg = ""

    def __enter__(self) -> Drawing:
        self._context.__enter__()
        self._figure = Figure(figsize=self._size, layout="constrained")
        self.all: list[Axes] = list(self._figure.subplots(self._rows, 1, sharex=True, squeeze=False)[:, 0])
        return self

    @property
    def axes(self) -> Axes:
        return self.all[0]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                out = StringIO()
                self._figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
                self.svg = finish(out.getvalue(), self._name)
        finally:
            self._context.__exit__(None, None, None)


def finish(svg: str, name: str) -> str:
    """The element alone, scaled to its container, with colours as CSS variables, and its name for screen readers."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' width="[^"]*pt"| height="[^"]*pt"', "", svg, count=2)
    svg = re.sub(r"#0102([0-9a-f]{2})", lambda match: f"var(--{_NAMES[int(match[1], 16)]})", svg)
    svg = re.sub(r' id="(?!p[0-9a-f]{10}|m[0-9a-f]{10}|C)[^"]*"', "", svg)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="chart: {escape(name)}"', 1)
    return re.sub(r"\n\s*", "\n", svg).strip()


WIDE, HALF = 11.0, 5.4
MEMBERS = len(SERIES)
MOST_BARS = 120
MOST_KINDS = 3
"""kinds of groups that a step of the funnel names"""


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing with its legend, (colour, label) pairs."""

    svg: str
    legend: tuple[tuple[str, str], ...] = ()


def reward(summary: Summary) -> Chart:
    """Mean reward by version, the middle of its groups, and the means of both ends."""
    steps = [step for step in summary.steps if step.reward == step.reward]
    versions = [step.version for step in steps]
    with Drawing("reward", WIDE, 3.3) as drawing:
        axes = drawing.axes
        axes.fill_between(
            versions, [s.low for s in steps], [s.high for s in steps], color=COLOUR["c1"], alpha=0.14, lw=0
        )
        axes.plot(versions, [s.reward for s in steps], color=COLOUR["c1"], marker="o", markersize=2.6)
        if summary.edges is not None and len(steps) > 3:
            edge = min(10, len(steps) // 2)
            for mean, part in ((summary.edges[0], versions[:edge]), (summary.edges[1], versions[-edge:])):
                axes.plot([part[0], part[-1]], [mean, mean], color=COLOUR["c2"], lw=2.4)
                axes.annotate(
                    f"{mean:.3f}",
                    ((part[0] + part[-1]) / 2, mean),
                    xytext=(0, 7),
                    textcoords="offset points",
                    ha="center",
                    color=COLOUR["c2"],
                    weight="bold",
                    bbox={"boxstyle": "round,pad=0.15", "color": COLOUR["card"], "alpha": 0.8, "lw": 0},
                )
        for fault in summary.faults:
            axes.axvline(fault.version, color=COLOUR["c4"], lw=0.9, ls=(0, (2, 2)))
        axes.set_xlabel("version")
        axes.margins(x=0.015)
    legend = [("c1", "mean reward of the batch"), ("c2", "mean of the first and last versions")]
    legend += [("c4", "learners changed")] if summary.faults else []
    return Chart(drawing.svg, tuple(legend))


def staleness(summary: Summary) -> Chart:
    """How many versions behind the oldest and the newest token of each trained group were."""
    heads = [age for step in summary.steps for age in step.heads]
    tails = [age for step in summary.steps for age in step.tails]
    eta = max(summary.etas, default=0)
    top = min(max([*heads, *tails, eta, 1]), bounds.ETA)  # what records say has no bound
    ages = np.arange(top + 1)
    with Drawing("staleness", HALF, 2.9) as drawing:
        axes = drawing.axes
        for shift, values, colour in ((-0.2, heads, "c1"), (0.2, tails, "c3")):
            share = [100 * values.count(int(age)) / max(1, len(values)) for age in ages]
            bars = axes.bar(ages + shift, share, 0.36, color=COLOUR[colour])
            for bar, value in zip(bars, share, strict=True):
                if value:
                    x = bar.get_x() + bar.get_width() / 2
                    axes.text(x, value, f"{value:.0f}%", ha="center", va="bottom", color=COLOUR["muted"], size=7.5)
        axes.axvline(eta + 0.5, color=COLOUR["c2"], lw=1.4, ls=(0, (4, 3)))
        place = (eta + 0.5, 1)
        axes.annotate(f" η = {eta}", place, xycoords=("data", "axes fraction"), va="top", color=COLOUR["c2"])
        axes.set_xlim(-0.6, top + 0.9)
        axes.set_xticks(ages)
        axes.set(xlabel="versions behind", ylabel="% of groups")
    return Chart(drawing.svg, (("c1", "oldest token (head)"), ("c3", "newest token (tail)")))


def staleness_by_version(summary: Summary) -> Chart:
    """The same over time."""
    steps = [step for step in summary.steps if step.heads]
    with Drawing("staleness-over-time", HALF, 2.9) as drawing:
        axes = drawing.axes
        versions = [step.version for step in steps]
        for field, colour in (("heads", "c1"), ("tails", "c3")):
            means = [float(np.mean(getattr(step, field))) for step in steps]
            axes.plot(versions, means, color=COLOUR[colour])
        axes.plot(versions, [max(step.heads) for step in steps], color=COLOUR["c1"], lw=0, marker="_", markersize=4)
        axes.step(versions, [step.eta for step in steps], color=COLOUR["c2"], lw=1.2, ls=(0, (4, 3)), where="mid")
        axes.set_ylim(bottom=-0.08)
        axes.set(xlabel="version", ylabel="versions behind")
    return Chart(drawing.svg, (("c1", "head, mean and oldest"), ("c3", "tail, mean"), ("c2", "η")))


def learners(summary: Summary) -> Chart:
    """Who computed which share of each version's tokens."""
    members = list(dict.fromkeys(member for step in summary.steps for member, _, _ in step.shares))
    versions = [step.version for step in summary.steps]
    with Drawing("learners", WIDE, 2.5) as drawing:
        axes = drawing.axes
        _stack(axes, versions, [[_share(step, member) for step in summary.steps] for member in members])
        axes.set_ylim(0, 100)
        axes.set(xlabel="version", ylabel="% of tokens")
        axes.margins(x=0.01)
    names = [(SERIES[at % MEMBERS], short_name(member)) for at, member in enumerate(members[:12])]
    return Chart(drawing.svg, tuple(names))


def _stack(axes: Axes, versions: Sequence[int], rows: Sequence[Sequence[float]]) -> None:
    """Rows on top of each other: bars while they can be told apart, else areas, which stay small."""
    base = np.zeros(len(versions))
    for at, row in enumerate(rows):
        top, colour = base + np.array(row), COLOUR[SERIES[at % MEMBERS]]
        if len(versions) <= MOST_BARS:
            axes.bar(versions, row, 0.86, bottom=base, color=colour)
        else:
            axes.fill_between(versions, base, top, step="mid", color=colour, lw=0)
        base = top


def _share(step: CommittedVersion, member: str) -> float:
    total = sum(tokens for _, _, tokens in step.shares)
    return 100 * sum(tokens for name, _, tokens in step.shares if name == member) / total if total else 0.0


def groups(summary: Summary) -> Chart:
    """Tickets granted, groups resolved and groups trained, counted up over time."""
    flow = summary.flow
    with Drawing("groups", HALF, 2.9) as drawing:
        axes = drawing.axes
        if flow.times:
            minutes = (np.array(flow.times) - flow.times[0]) / SECOND / 60
            lines = {"c4": flow.granted, "c1": flow.ready, "c3": flow.trained, "c2": flow.negative}
            for colour, values in lines.items():
                axes.plot(minutes, values, color=COLOUR[colour], drawstyle="steps-post", lw=1.5)
        axes.set(xlabel="minutes", ylabel="groups")
        axes.margins(x=0.01)
        axes.set_ylim(bottom=0)
    return Chart(drawing.svg, (("c4", "granted"), ("c1", "ready"), ("c3", "trained"), ("c2", "ended otherwise")))


def funnel(summary: Summary) -> Chart:
    """How many groups came how far, and where the others are."""
    stages = summary.funnel
    with Drawing("funnel", HALF, 2.9) as drawing:
        axes = drawing.axes
        axes.grid(False)
        colours = [COLOUR[name] for name in ("c4", "c8", "c1", "c3")]
        axes.barh([stage.name for stage in stages], [stage.groups for stage in stages], 0.46, color=colours)
        for at, stage in enumerate(stages):
            axes.text(stage.groups, at, f" {stage.groups:,}", va="center", color=COLOUR["fg"])
            if text := _remainder(stage):
                axes.text(0, at - 0.5, text, va="center", color=COLOUR["muted"], size=7.5)
        axes.set_ylim(len(stages) - 0.5, -0.6)
        axes.margins(x=0.12)
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(axis="y", colors=COLOUR["fg"])
    return Chart(drawing.svg)


def _remainder(stage: FunnelStage) -> str:
    """Where the groups are that did not come to a stage, those of few kinds by name."""
    kinds = [(name, count) for name, count in stage.left if count > 0]
    parts = [f"{count:,} {name}" for name, count in kinds[:MOST_KINDS]]
    if rest := sum(count for _, count in kinds[MOST_KINDS:]):
        parts.append(f"{rest:,} otherwise")
    return "without " + ", ".join(parts) if parts else ""


def time(summary: Summary) -> Chart:
    """Where each version's time went, by phase."""
    names = [name for name, _ in summary.phases()]
    longest, rest = names[:7], names[7:]
    versions = [step.version for step in summary.steps]
    phases = [dict(step.phases) for step in summary.steps]
    rows = [[seconds.get(name, 0.0) for seconds in phases] for name in longest]
    if rest:
        rows.append([sum(seconds.get(name, 0.0) for name in rest) for seconds in phases])
    with Drawing("time", HALF, 2.9) as drawing:
        axes = drawing.axes
        _stack(axes, versions, rows)
        axes.set(xlabel="version", ylabel="seconds")
        axes.margins(x=0.01)
    legend = [(SERIES[at], name) for at, name in enumerate([*longest, *(["other phases"] if rest else [])])]
    return Chart(drawing.svg, tuple(legend))


def pace(summary: Summary) -> Chart:
    """Seconds between commits, and tokens trained per second."""
    steps = [step for step in summary.steps if step.seconds]
    versions = [step.version for step in steps]
    changes = {fault.version for fault in summary.faults}
    with Drawing("pace", HALF, 2.9, rows=2) as drawing:
        gaps, speed = drawing.all
        _stack(gaps, versions, [[step.seconds for step in steps]])
        change_steps = [step for step in steps if step.version in changes]
        gaps.plot(
            [s.version for s in change_steps],
            [s.seconds for s in change_steps],
            color=COLOUR["c4"],
            lw=0,
            marker="o",
            ms=4,
        )
        gaps.set_ylabel("s between\ncommits")
        speed.plot(versions, [step.tokens / step.seconds for step in steps], color=COLOUR["c3"], lw=1.4)
        speed.set(xlabel="version", ylabel="tokens/s")
        speed.set_ylim(bottom=0)
        speed.margins(x=0.01)
    legend = [("c1", "seconds since the version before"), ("c3", "tokens per second")]
    return Chart(drawing.svg, (*legend, *([("c4", "learners changed")] if summary.faults else [])))


CHARTS = (reward, staleness, staleness_by_version, learners, groups, funnel, time, pace)


def draw(summary: Summary) -> dict[str, Chart]:
    """Every chart by name; none while there is no version to draw."""
    return {chart.__name__: chart(summary) for chart in CHARTS} if summary.steps else {}
