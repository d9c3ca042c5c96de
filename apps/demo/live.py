"""What the demo shows while it runs: tables that are redrawn on a terminal, a line a version elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from millrace.consumers.tell.status import StatusWatch, learning, processes
from millrace.infra.machine.supervisor import ProgramState
from millrace.schemas.records import LedgerEntry


def line(entry: LedgerEntry, rate: float) -> str:
    """One version in words. `rate` in samples a second."""
    metrics = entry["metrics"]
    shares = "+".join(str(share["samples"]) for share in entry["ranks"])
    return (
        f"v{entry['version']:<3} reward {metrics.get('reward_mean', 0.0):.3f}  "
        f"staleness {metrics.get('staleness_mean', 0.0):.2f} (max {metrics.get('staleness_max', 0.0):.0f})  "
        f"learners {len(entry['ranks'])} ({shares} samples)  {rate:.0f} samples/s"
    )


class DemoScreen:
    """Draws the watch, the programs and the story so far."""

    def __init__(self, console: Console, target: int) -> None:
        self._console = console
        self._target = target
        self._story: list[str] = []
        self._started = time.monotonic()
        self._live = Live(console=console, refresh_per_second=2) if console.is_terminal else None

    def __enter__(self) -> DemoScreen:
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

    def show(self, watch: StatusWatch, programs: Callable[[], Sequence[ProgramState]]) -> None:
        """Redraw; `programs` is asked only when somebody looks."""
        if self._live:
            self._live.update(self._draw(watch, programs()))

    def _draw(self, watch: StatusWatch, programs: Sequence[ProgramState]) -> RenderableType:
        story = Text("\n".join(self._story[-10:]))
        return Group(
            Panel(learning(watch, self._target), title="learning"),
            Panel(processes(programs), title="processes"),
            Panel(story, title="story"),
        )
