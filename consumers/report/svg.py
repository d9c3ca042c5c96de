"""matplotlib figures as SVG that takes its colours and its font from the page.

Invariants: no global state of matplotlib is touched; the same figure gives the same bytes; ids inside one figure occur
in no other of the page."""

from __future__ import annotations

import re
from html import escape
from io import StringIO
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
    """One figure being drawn: `with Drawing("reward", 11, 3) as d: d.axes.plot(...)`, then `d.svg`."""

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
    svg = re.sub(r"#0102([0-9a-f]{2})", lambda found: f"var(--{_NAMES[int(found[1], 16)]})", svg)
    svg = re.sub(r' id="(?!p[0-9a-f]{10}|m[0-9a-f]{10}|C)[^"]*"', "", svg)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="chart: {escape(name)}"', 1)
    return re.sub(r"\n\s*", "\n", svg).strip()
