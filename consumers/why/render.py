"""A story as a tree for a terminal: records in the order in which they came about, each with its place. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from rich.text import Text
from rich.tree import Tree

from consumers.audit.command import spot
from consumers.audit.rows import Row
from consumers.why.story import Passage, Story
from consumers.why.verdict import verdict
from schemas.arrays import unpack
from schemas.errors import SchemaError


def render(story: Story) -> Tree:
    """The whole tree; what was asked for is marked."""
    subject = story.subject
    tree = Tree(Text.assemble((f"{subject.kind} {subject.id}", "bold"), ": ", (verdict(story), "bold green")))
    for row in story.grants:
        again = f", round {row['round']} for samples {row['samples']}" if row["round"] else ""
        line = f"granted as ticket {row['ticket']}{again}: prompt {row['prompt_id']}, {row['group_size']} samples"
        _add(tree, f"{line}, from version {row['min_version']} on, for batch {row['deadline']} at last", row)
    attempts: dict[str, Tree] = {}
    told: set[str] = set()
    for passage in story.passages:
        event = passage.row
        name = event["root_trajectory"] if event is not None else "cannot be read"
        if name not in attempts:
            attempts[name] = tree.add(_attempt(story, name))
        if subject.trajectory in (None, name) or passage.letters:
            _passage(attempts[name], passage, story, again=event is not None and event["id"] in told)
        if passage.event is not None:
            told.add(passage.event["id"])
    for row in story.samples:
        _sample(attempts.get(row["id"], tree), row)
    for row in story.completions:
        _add(tree, _completion(row), row)
    for row in story.letters:
        _add(tree, f"dead letter of {row['stage']}: {row['reason']} ({row['detail']})", row, style="red")
    for row in story.resolutions:
        _add(tree, _resolution(row), row, style="" if row["kind"] == "ready" else "yellow")
    for row, group in story.trained():
        lost = f"as lost: {group['lost']}" if group["lost"] else f"with seqs {row['seq_lo']} to {row['seq_hi'] - 1}"
        line = (
            f"version {row['version']} trained from version {row['version'] - 1} {lost} on {len(row['ranks'])} rank(s)"
        )
        _add(tree, line, row, style="green")
    return tree


def _attempt(story: Story, name: str) -> Text:
    first = next((p.row for p in story.passages if p.row is not None and p.row["root_trajectory"] == name), None)
    text = Text(f"session {name}", "bold" if name == story.subject.trajectory else "")
    if first is not None:
        events = sum(p.row is not None and p.row["root_trajectory"] == name for p in story.passages)
        text.append(f" (attempt {first['attempt']}, {first['split']}, {events} events)", "dim")
    return text


def _passage(tree: Tree, passage: Passage, story: Story, *, again: bool) -> None:
    """One event; `again` says that the same one came before."""
    row = passage.row
    if row is None:
        branch = tree.add(Text(f"bytes that are no event {_at(passage)}"))
    else:
        wanted = story.subject.event == row["id"]
        text = Text(f"{row['step']:>3} " if row["source_seq"] is not None else "  - ", "dim")
        text.append(_event(row), "bold reverse" if wanted else "")
        text.append(f"  {_when(row['event_time'])} {_at(passage)}", "dim")
        branch = tree.add(text)
        if passage.event is not None:
            _governed(branch, passage.event)
        elif not passage.letters:
            branch.add(Text("sent twice, skipped here" if again else "not refined yet", "dim"))
    for letter in passage.letters:
        _add(branch, f"dead letter of {letter['stage']}: {letter['reason']} ({letter['detail']})", letter, style="red")


def _governed(tree: Tree, event: Row) -> None:
    """Only what is out of the ordinary."""
    governance: dict[str, Any] = event["governance"] or {}
    if governance.get("eligibility") in ("denied", "audit_only"):
        tree.add(Text(f"{governance['eligibility']}: {governance['reason']}", "yellow"))
    if governance.get("redaction") not in (None, "none_needed"):
        found = ", ".join(f"{count} {what}" for what, count in sorted(governance["counts"].items()))
        tree.add(Text(f"redaction {governance['redaction']}: {found or 'no findings'}", "yellow"))


def _event(row: Row) -> str:
    """One line about an event."""
    try:
        body = row.body
    except SchemaError:
        return f"{row['kind']} (its body cannot be read)"
    match row["kind"]:
        case "model_call":
            versions = unpack(body["output_versions"])
            made = f"{len(versions)} tokens"
            if len(versions):
                low, high = int(versions.min()), int(versions.max())
                made += f" of version {low}" if low == high else f" of versions {low} to {high}"
            retry = f", retries {body['supersedes']}" if body["supersedes"] else ""
            barred = "" if body["trainable"] else f", untrainable: {body['untrainable_reason']}"
            return f"model call, reply {body['response_id']}: {made}, {body['finish_reason']}{retry}{barred}"
        case "reward":
            value = f"{body['value']:.4g}" if body["value"] is not None else f"missing ({body['failure']})"
            return f"reward {value} from {body['source']} for {body['target_kind']} {body['target']}"
        case "episode_started":
            return f"started: task {body['task_id']}, sample {body['sample']} of {body['group_size']}"
        case "episode_ended":
            reason = f", {body['reason']}" if body["reason"] else ""
            return f"ended: {body['status']} ({body['stop_condition']}){reason}"
        case "tool_call" | "tool_result":
            return f"{row['kind'].replace('_', ' ')} {body['name']} ({body['call_id']})"
        case "gap":
            return f"gap: {body['missed']} events lost, {body['reason']}"
        case kind:
            return str(kind).replace("_", " ")


def _sample(tree: Tree, row: Row) -> None:
    what = "evaluation" if row["split"] == "evaluation" else "sample"
    reward = "no reward" if row["reward"] is None else f"reward {row['reward']:.3f}"
    line = f"sealed as {what} {row['sample']}: {reward}, {row['tokens']} trainable of {row['length']} tokens"
    if row["tokens"]:
        one = row["v_head"] == row["v_tail"]
        line += f", version {row['v_head']}" if one else f", versions {row['v_head']} to {row['v_tail']}"
    branch = _add(tree, line, row)
    for entry in row["excluded"]:
        reply, _, reason = entry.rpartition(":")
        branch.add(Text(f"left out: {reply} ({reason})", "yellow"))
    if row["missing"]:
        branch.add(Text(f"never judged by {', '.join(row['missing'])}", "yellow"))


def _completion(row: Row) -> str:
    count = f"{len(row['samples'])} of {row['size']} samples"
    reason = f": {row['reason']}" if row["reason"] else ""
    return f"group {row['kind'].replace('_', '-')}, {count}{reason}"


def _resolution(row: Row) -> str:
    if row["kind"] == "ready":
        asked = "" if row["solicited"] else ", unsolicited"
        return f"resolved as ready: ticket {row['ticket']}, seq {row['seq']}{asked}"
    return f"resolved as {row['kind']}: {row['reason'] or 'no reason given'}"


def _add(tree: Tree, line: str, row: Row, style: str = "") -> Tree:
    text = Text(line, style)
    text.append(f"  {_when(row.raw.timestamp)} {spot(row.place)}", "dim")
    return tree.add(text)


def _at(passage: Passage) -> str:
    places = [place for place in (passage.raw_place, passage.event.place if passage.event else None) if place]
    return " → ".join(spot(place) for place in places)


def _when(micros: int) -> str:
    return datetime.fromtimestamp(micros / 1e6, UTC).strftime("%H:%M:%S.%f")[:-3]
