"""What a terminal shows of an episode: the story of a subject, and the account of one trajectory, each as a tree. Pure.

Invariants: records stand in the order in which they came about, each with its place; texts go in as text, never as
markup; control characters are made harmless by the console (`Terminal`)."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from millrace.consumers.audit.command import spot
from millrace.consumers.tell.account import (
    Account,
    AccountedReward,
    EventAccount,
    Spell,
    TokenRun,
    TokenRuns,
    TraceAccount,
    facts,
    texts_of,
    training_lines,
)
from millrace.consumers.tell.events import event_line, governance_notes, texts_in
from millrace.consumers.tell.story import Passage, Story, verdict
from millrace.infra.log.history.requests import WholeRequests
from millrace.infra.log.history.rows import Row
from millrace.schemas.records import Completion, Resolution, Trajectory


def story_tree(story: Story, *, text: bool = False) -> Tree:
    """The whole tree; what was asked for is marked. `text`: with what was said in each event."""
    subject = story.subject
    tree = Tree(Text.assemble((f"{subject.kind} {subject.id}", "bold"), ": ", (verdict(story), "bold green")))
    for grant in story.grants:
        more = f", round {grant['round']} for samples {grant['samples']}" if grant["round"] else ""
        line = f"granted as ticket {grant['ticket']}{more}: prompt {grant['prompt_id']}, {grant['group_size']} samples"
        _add(tree, f"{line}, from version {grant['min_version']} on, for batch {grant['deadline']} at last", grant)
    attempts: dict[str, Tree] = {}
    ids: set[str] = set()
    requests = WholeRequests()
    for passage in story.passages:
        event = passage.row
        name = event["root_trajectory"] if event is not None else "cannot be read"
        if name not in attempts:
            attempts[name] = tree.add(_attempt(story, name))
        if subject.trajectory in (None, name) or passage.letters:
            twice = event is not None and event["id"] in ids
            branch = _passage(attempts[name], passage, story, is_repeat=twice)
            if text and passage.event is not None:
                for speaker, words in texts_in(passage.event, requests):
                    branch.add(Text.assemble((f"{speaker}: ", "cyan"), words))
        if passage.event is not None:
            ids.add(passage.event["id"])
    for sample in story.samples:
        _sample(attempts.get(sample["id"], tree), sample)
    for completion in story.completions:
        _add(tree, _completion(completion), completion)
    for letter in story.letters:
        _add(tree, f"dead letter of {letter['stage']}: {letter['reason']} ({letter['detail']})", letter, style="red")
    for resolution in story.resolutions:
        _add(tree, _resolution(resolution), resolution, style="" if resolution["kind"] == "ready" else "yellow")
    for entry, group in story.training():
        loss = f"as lost: {group['lost']}" if group["lost"] else f"with seqs {entry['seq_lo']} to {entry['seq_hi'] - 1}"
        version, ranks = entry["version"], len(entry["ranks"])
        line = f"version {version} trained from version {version - 1} {loss} on {ranks} rank(s)"
        _add(tree, line, entry, style="green")
    return tree


def _attempt(story: Story, name: str) -> Text:
    first = next((p.row for p in story.passages if p.row is not None and p.row["root_trajectory"] == name), None)
    text = Text(f"session {name}", "bold" if name == story.subject.trajectory else "")
    if first is not None:
        events = sum(p.row is not None and p.row["root_trajectory"] == name for p in story.passages)
        text.append(f" (attempt {first['attempt']}, {first['split']}, {events} events)", "dim")
    return text


def _passage(tree: Tree, passage: Passage, story: Story, *, is_repeat: bool) -> Tree:
    """One event. is_repeat: the same one came before."""
    row = passage.row
    if row is None:
        branch = tree.add(Text(f"bytes that are no event {_at(passage)}"))
    else:
        is_subject = story.subject.event == row["id"]
        text = Text(f"{row['step']:>3} " if row["source_seq"] is not None else "  - ", "dim")
        text.append(event_line(row), "bold reverse" if is_subject else "")
        text.append(f"  {_when(row['event_time'])} {_at(passage)}", "dim")
        branch = tree.add(text)
        if passage.event is not None:
            for note in governance_notes(passage.event, findings=True):
                branch.add(Text(note, "yellow"))
        elif not passage.letters:
            branch.add(Text("sent twice, skipped here" if is_repeat else "not refined yet", "dim"))
    for letter in passage.letters:
        _add(branch, f"dead letter of {letter['stage']}: {letter['reason']} ({letter['detail']})", letter, style="red")
    return branch


def _sample(tree: Tree, row: Row[Trajectory]) -> None:
    kind = "evaluation" if row["split"] == "evaluation" else "sample"
    reward = "no reward" if row["reward"] is None else f"reward {row['reward']:.3f}"
    line = f"sealed as {kind} {row['sample']}: {reward}, {row['tokens']} trainable of {row['length']} tokens"
    if row["tokens"]:
        one = row["v_head"] == row["v_tail"]
        line += f", version {row['v_head']}" if one else f", versions {row['v_head']} to {row['v_tail']}"
    branch = _add(tree, line, row)
    for entry in row["excluded"]:
        reply, _, reason = entry.rpartition(":")
        branch.add(Text(f"left out: {reply} ({reason})", "yellow"))
    if row["missing"]:
        branch.add(Text(f"never judged by {', '.join(row['missing'])}", "yellow"))


def _completion(row: Row[Completion]) -> str:
    count = f"{len(row['samples'])} of {row['size']} samples"
    reason = f": {row['reason']}" if row["reason"] else ""
    return f"group {row['kind'].replace('_', '-')}, {count}{reason}"


def _resolution(row: Row[Resolution]) -> str:
    if row["kind"] == "ready":
        note = "" if row["solicited"] else ", unsolicited"
        return f"resolved as ready: ticket {row['ticket']}, seq {row['seq']}{note}"
    return f"resolved as {row['kind']}: {row['reason'] or 'no reason given'}"


def _add(tree: Tree, line: str, row: Row[Any], style: str = "") -> Tree:
    text = Text(line, style)
    text.append(f"  {_when(row.raw.timestamp)} {spot(row.place)}", "dim")
    return tree.add(text)


def _at(passage: Passage) -> str:
    places = [place for place in (passage.raw_place, passage.event.place if passage.event else None) if place]
    return " → ".join(spot(place) for place in places)


def _when(micros: int) -> str:
    try:
        return datetime.fromtimestamp(micros / 1e6, UTC).strftime("%H:%M:%S.%f")[:-3]
    except (OverflowError, OSError, ValueError):  # a producer writes any time
        return "–"


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


def account_tree(account: Account, *, tokens: bool = False, spell: Spell | None = None) -> RenderableType:
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
    for line in training_lines(account):
        root.add(Text(line, "green"))
    return Group(root, legend()) if account.lineages else root


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
    for speaker, text in turn.said:
        node.add(Text.assemble((f"{speaker}: ", ROLES.get(speaker, "cyan")), text))
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


def _lineage(parent: Tree, lineage: TokenRuns, *, tokens: bool, spell: Spell | None) -> None:
    if lineage.unreadable is not None:
        parent.add(Text(f"lineage {lineage.id}: its tokens cannot be read: {lineage.unreadable}", "yellow"))
        return
    counts = ", ".join(f"{count} {weight}" for weight, count in lineage.count().items())
    node = parent.add(Text(f"lineage {lineage.id}: {lineage.length} tokens ({counts})", "bold"))
    if tokens:
        text = Text()
        for run in lineage.runs:
            for one in texts_of(run, spell):
                text.append(one if spell is not None else f"{one} ", style_of(run))
        node.add(text)
        return
    for run in lineage.runs:
        origin = f"version {run.version}" if run.version is not None else "read"
        mean = f", mean logprob {run.logprob:.3f}" if run.logprob is not None else ""
        node.add(Text(f"{run.start}..{run.end - 1}  {origin}, {run.weight}{mean}", style_of(run)))


def style_of(run: TokenRun) -> str:
    """How a terminal shows the tokens of a run."""
    colour = "" if run.version is None else f" {COLOURS[run.version % len(COLOURS)]}"
    return f"{WEIGHTS[run.weight]}{colour}"
