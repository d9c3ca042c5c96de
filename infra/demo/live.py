"""What the demo shows while it runs: a table that is redrawn on a terminal, a line a version elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from infra.demo.watch import Watch
from infra.services.supervisor import State
from schemas.records import LedgerEntry

BARS = "▁▂▃▄▅▆▇█"


def spark(values: Sequence[float], low: float = 0.0, high: float = 1.0) -> str:
    """One block character a value, `low` to `high`."""
    span = max(1e-9, high - low)
    return "".join(BARS[min(7, max(0, int((value - low) / span * 8)))] for value in values)


def line(entry: LedgerEntry, rate: float) -> str:
    """One version in words. `rate` in samples a second."""
    metrics = entry["metrics"]
    shares = "+".join(str(share["samples"]) for share in entry["ranks"])
    return (
        f"v{entry['version']:<3} reward {metrics.get('reward_mean', 0.0):.3f}  "
        f"staleness {metrics.get('staleness_mean', 0.0):.2f} (max {metrics.get('staleness_max', 0.0):.0f})  "
        f"learners {len(entry['ranks'])} ({shares} samples)  {rate:.0f} samples/s"
    )


class Screen:
    """Draws the watch, the programs and the story so far."""

    def __init__(self, console: Console, target: int) -> None:
        self._console = console
        self._target = target
        self._story: list[str] = []
        self._started = time.monotonic()
        self._live = Live(console=console, refresh_per_second=2) if console.is_terminal else None

    def __enter__(self) -> Screen:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def tell(self, text: str) -> None:
        """Something happened: stays on the screen, with its time."""
        text = f"{time.monotonic() - self._started:5.0f} s  {text}"
        self._story.append(text)
        if not self._live:
            self._console.print(text, highlight=False, soft_wrap=True)

    def version(self, entry: LedgerEntry, rate: float) -> None:
        """A new version was committed."""
        if not self._live:
            self._console.print(f"        {line(entry, rate)}", highlight=False, soft_wrap=True)

    def show(self, watch: Watch, programs: Callable[[], Sequence[State]]) -> None:
        """Redraw; `programs` is asked only when somebody looks."""
        if self._live:
            self._live.update(self._draw(watch, programs()))

    def _draw(self, watch: Watch, programs: Sequence[State]) -> RenderableType:
        alive = Table(box=None, padding=(0, 2), header_style="dim")
        for title in ("process", "state", "pid", "up"):
            alive.add_column(title)
        for state in programs:
            colour = "green" if state.state == "RUNNING" else "yellow"
            alive.add_row(state.name, Text(state.state.lower(), colour), str(state.pid or "-"), f"{state.up_s:.0f} s")
        learning = Table(box=None, show_header=False, padding=(0, 2))
        rewards = watch.rewards
        learning.add_row("version", f"{watch.version} of {self._target}")
        learning.add_row("reward", f"{rewards[-1]:.3f}  {spark(rewards[-60:])}" if rewards else "-")
        if watch.versions:
            metrics = watch.versions[-1]["metrics"]
            mean, most = metrics.get("staleness_mean", 0.0), metrics.get("staleness_max", 0.0)
            learning.add_row("staleness", f"mean {mean:.2f}, max {most:.0f} versions")
            ranks = ", ".join(f"rank {s['rank']}: {s['samples']}" for s in watch.versions[-1]["ranks"])
            learning.add_row("learners", f"{len(watch.versions[-1]['ranks'])} ({ranks} samples)")
        speed = f"{watch.rate('samples'):.0f} samples/s, {watch.rate('tokens_computed'):.0f} tokens/s"
        learning.add_row("speed", speed)
        learning.add_row("lag", f"{watch.lag} ready groups wait")
        learning.add_row(
            "groups", ", ".join(f"{kind} {count}" for kind, count in sorted(watch.resolved.items())) or "-"
        )
        story = Text("\n".join(self._story[-10:]))
        return Group(Panel(learning, title="learning"), Panel(alive, title="processes"), Panel(story, title="story"))
