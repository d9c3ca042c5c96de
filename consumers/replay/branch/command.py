"""`millrace replay branch`: what is printed while a branch is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.text import Text

from millrace.consumers.replay.branch.guard import WARN, Reach
from millrace.consumers.replay.branch.items import BranchItems
from millrace.consumers.replay.branch.job import BranchOptions
from millrace.consumers.replay.branch.run import Brancher, BranchObserver
from millrace.consumers.replay.selection import Question, Rule, SelectionResult, Selector
from millrace.consumers.replay.sql_selection import question
from millrace.infra.config import Settings
from millrace.infra.connect import claims, history
from millrace.infra.log.base import Place
from millrace.infra.terminal import Terminal
from millrace.trainers.weights.checkpoint import Checkpoint


def branch(
    settings: Settings,
    options: BranchOptions,
    rule: Rule = lambda _: True,
    places: Sequence[Place] | None = None,
    sql: str = "",
) -> None:
    """Make a branch of the configured policy, or go on with it, and say how it goes. rule: a filter; places, sql: what
    names the trajectories of which the rule takes."""
    ask = question(settings, sql, rule) if sql else _asking(rule, places)
    console = Terminal()
    with history(settings) as bus:
        last = Brancher(settings, bus, claims(settings)).run(options, ask, observer=BranchScreen(console, options))
    console.print(
        f"{options.name} is at version {last['version']}: {last['uri']}\n"
        f"`millrace --set policy.name={options.name} evaluate` scores it, `audit` proves it",
        highlight=False,
        soft_wrap=True,
    )


def _asking(options: Rule, places: Sequence[Place] | None) -> Question:
    def ask(selector: Selector) -> SelectionResult:
        return selector.by_rule(options) if places is None else selector.by_places(places, options)

    return ask


def reach_in_words(reach: Reach) -> str:
    """The figures of the guard on one line."""
    return (
        f"reach: ESS/n of sequences {reach.sequence_ess:.3f}, of tokens {reach.token_ess:.3f}; "
        f"KL {reach.kl:.4g} a token; {reach.outside:.1%} of ratios outside 0.5 to 2"
    )


class BranchScreen(BranchObserver):
    """Prints how a branch goes."""

    def __init__(self, console: Terminal, options: BranchOptions) -> None:
        self._console = console
        self._options = options

    def on_selection(self, candidates: int, choice: BranchItems, left_out: Counter[str]) -> None:
        self._say(
            f"{self._options.method}: {len(choice.items)} items from {len(choice.places)} of {candidates} trajectories"
        )
        for reason, count in left_out.most_common():
            self._say(f"  left out {count}: {reason}", "dim")

    def on_text(self, form: str, replies: int, unsaid: Counter[str]) -> None:
        self._say(f"{replies} replies are text without exact tokens, written by the renderer {form or 'of no form'}")
        for reason, count in unsaid.most_common():
            self._say(f"  passed over {count} replies: {reason}", "dim")

    def on_reach(self, reach: Reach) -> None:
        self._say(reach_in_words(reach), "green" if reach.word == "good" else "yellow")
        if reach.word == "low":
            self._say(f"few sequences carry the gradient (ESS/n below {WARN}): look at it on held-out tasks", "yellow")

    def on_resume(self, version: int) -> None:
        self._say(f"{self._options.name} exists and goes on from version {version}")

    def on_start(self, step: int, steps: int, items: int) -> None:
        self._say(f"batches {step + 1} to {steps}" if step < steps else "nothing is left to train")

    def on_version(self, checkpoint: Checkpoint) -> None:
        self._say(f"version {checkpoint.path.name}")

    def warn(self, text: str) -> None:
        self._say(text, "yellow")

    def _say(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style), highlight=False, soft_wrap=True)
