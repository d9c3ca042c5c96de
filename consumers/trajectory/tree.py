"""The account of a trajectory as a tree for a terminal. Pure.

Invariant: texts go in as text, never as markup; control characters are made harmless by the console (`Terminal`)."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from millrace.consumers.trajectory.account import Account, AccountedReward, EventAccount, TraceAccount
from millrace.consumers.trajectory.tokens import Spell, TokenRun, Traced, spelled

COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "bright_red")
"""of versions, in turn"""
ROLES = {"assistant": "bold green", "user": "bold blue", "system": "bold magenta", "tool": "bold yellow"}
WEIGHTS = {
    "context": "dim",
    "left out": "dim strike",
    "may train": "italic",
    "trained": "bold",
    "stale": "dim underline",
}


def tree(account: Account, *, tokens: bool = False, spell: Spell | None = None) -> RenderableType:
    """The whole account. tokens: each token, its text by `spell`, instead of each run."""
    root = Tree(Text.assemble((f"trajectory {account.id}", "bold"), ": ", (account.verdict, "bold green")))
    for line in facts(account):
        root.add(Text(line, "dim"))
    for branch in account.branches:
        _branch(root if len(account.branches) == 1 else root.add(_title(branch)), branch)
    if account.rewards:
        rewards = root.add(Text("rewards", "bold"))
        for reward in account.rewards:
            rewards.add(_reward(reward))
    for lineage in account.lineages:
        _lineage(root, lineage, tokens=tokens, spell=spell)
    for line in trained(account):
        root.add(Text(line, "green"))
    return Group(root, legend()) if account.lineages else root


def facts(account: Account) -> list[str]:
    """What it belongs to, a line each."""
    lines = [f"task {account.task}, group {account.group}, tenant {account.tenant}, attempt {account.attempt}"]
    if account.place is not None:
        reward = "no reward" if account.reward is None else f"reward {account.reward:.4g}"
        silent = f", never judged by {', '.join(account.missing)}" if account.missing else ""
        lines.append(f"sealed as {account.split} sample {account.sample}: {account.status}, {reward}{silent}")
        lines[-1] += f"  {account.place}"
    else:
        lines.append("not sealed")
    return lines + [f"left out: {entry.replace(':', ': ', 1)}" for entry in account.excluded]


def trained(account: Account) -> list[str]:
    """What trained on it, a line each."""
    out = []
    for one in account.trained:
        line = f"trained version {one.version} (seq {one.seq}, eta {one.eta})"
        if one.lost:
            line += f", as lost: {one.lost}"
        elif one.advantage is not None:
            line += f", reward over its group {one.advantage:+.4g}"
        if one.masked_tokens:
            line += f", {one.masked_tokens} tokens of the batch masked as stale"
        whole = ", ".join(f"{name} {value:.4g}" for name, value in one.batch.items())
        out.append(f"{line}{'; whole batch: ' if whole else ''}{whole}  {one.place}")
    return out


def legend() -> Text:
    """What the styles of tokens mean."""
    samples = [part for weight, style in WEIGHTS.items() for part in ((weight, style), "  ")]
    return Text.assemble(("tokens: ", "dim"), *samples, ("colours: versions", "dim"))


def _title(branch: TraceAccount) -> Text:
    parent = f", spawned by {branch.parent}" if branch.parent else ""
    return Text(f"trace {branch.id}{parent}", "bold")


def _branch(parent: Tree, branch: TraceAccount) -> None:
    for turn in branch.turns:
        _turn(parent, turn)


def _turn(parent: Tree, turn: EventAccount) -> None:
    step = f"{turn.step:>3} " if turn.step is not None else "  - "
    node = parent.add(Text.assemble((step, "dim"), turn.line, (f"  {turn.place}", "dim")))
    for who, said in turn.said:
        node.add(Text.assemble((f"{who}: ", ROLES.get(who, "cyan")), said))
    for note in turn.notes:
        node.add(Text(note, "yellow"))


def _reward(one: AccountedReward) -> Text:
    value = f"{one.value:.4g}" if one.value is not None else f"missing ({one.failure})"
    text = Text(f"{value} from {one.source} (rubric {one.rubric}) for {one.target}: ")
    text.append(one.fate, "green" if one.fate == "counted" else "yellow")
    if one.detail:
        text.append(f", {one.detail}")
    if one.critique:
        text.append(f"; {one.critique}", "italic")
    return text.append(f"  {one.place}", "dim")


def _lineage(parent: Tree, lineage: Traced, *, tokens: bool, spell: Spell | None) -> None:
    if lineage.unreadable is not None:
        parent.add(Text(f"lineage {lineage.id}: its tokens cannot be read: {lineage.unreadable}", "yellow"))
        return
    counts = ", ".join(f"{count} {weight}" for weight, count in lineage.count().items())
    node = parent.add(Text(f"lineage {lineage.id}: {lineage.length} tokens ({counts})", "bold"))
    if tokens:
        text = Text()
        for run in lineage.runs:
            for one in spelled(run, spell):
                text.append(one if spell is not None else f"{one} ", style_of(run))
        node.add(text)
        return
    for run in lineage.runs:
        made = f"version {run.version}" if run.version is not None else "read"
        mean = f", mean logprob {run.logprob:.3f}" if run.logprob is not None else ""
        node.add(Text(f"{run.start}..{run.end - 1}  {made}, {run.weight}{mean}", style_of(run)))


def style_of(run: TokenRun) -> str:
    """How a terminal shows the tokens of a run."""
    colour = "" if run.version is None else f" {COLOURS[run.version % len(COLOURS)]}"
    return f"{WEIGHTS[run.weight]}{colour}"
