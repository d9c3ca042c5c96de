"""A story as a tree for a terminal: records in the order in which they came about, each with its place. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from rich.text import Text
from rich.tree import Tree

from millrace.consumers.audit.command import spot
from millrace.consumers.why.event_text import spoken
from millrace.consumers.why.story import Passage, Story
from millrace.consumers.why.verdict import verdict
from millrace.infra.engines.upstream import NOT_WHOLE
from millrace.infra.log.history.requests import WholeRequests
from millrace.infra.log.history.rows import Row
from millrace.schemas.arrays import unpack
from millrace.schemas.errors import SchemaError
from millrace.schemas.records import (
    Completion,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    Gap,
    ModelCall,
    Resolution,
    Reward,
    ToolCall,
    ToolResult,
    Trajectory,
)


def render(story: Story, *, text: bool = False) -> Tree:
    """The whole tree; what was asked for is marked. `text`: with what was said in each event."""
    subject = story.subject
    tree = Tree(Text.assemble((f"{subject.kind} {subject.id}", "bold"), ": ", (verdict(story), "bold green")))
    for grant in story.grants:
        again = f", round {grant['round']} for samples {grant['samples']}" if grant["round"] else ""
        line = f"granted as ticket {grant['ticket']}{again}: prompt {grant['prompt_id']}, {grant['group_size']} samples"
        _add(tree, f"{line}, from version {grant['min_version']} on, for batch {grant['deadline']} at last", grant)
    attempts: dict[str, Tree] = {}
    told: set[str] = set()
    requests = WholeRequests()
    for passage in story.passages:
        event = passage.row
        name = event["root_trajectory"] if event is not None else "cannot be read"
        if name not in attempts:
            attempts[name] = tree.add(_attempt(story, name))
        if subject.trajectory in (None, name) or passage.letters:
            twice = event is not None and event["id"] in told
            branch = _passage(attempts[name], passage, story, again=twice)
            if text and passage.event is not None:
                for who, said in spoken(passage.event, requests):
                    branch.add(Text.assemble((f"{who}: ", "cyan"), said))
        if passage.event is not None:
            told.add(passage.event["id"])
    for sample in story.samples:
        _sample(attempts.get(sample["id"], tree), sample)
    for completion in story.completions:
        _add(tree, _completion(completion), completion)
    for letter in story.letters:
        _add(tree, f"dead letter of {letter['stage']}: {letter['reason']} ({letter['detail']})", letter, style="red")
    for resolution in story.resolutions:
        _add(tree, _resolution(resolution), resolution, style="" if resolution["kind"] == "ready" else "yellow")
    for entry, group in story.trained():
        lost = f"as lost: {group['lost']}" if group["lost"] else f"with seqs {entry['seq_lo']} to {entry['seq_hi'] - 1}"
        version, ranks = entry["version"], len(entry["ranks"])
        line = f"version {version} trained from version {version - 1} {lost} on {ranks} rank(s)"
        _add(tree, line, entry, style="green")
    return tree


def _attempt(story: Story, name: str) -> Text:
    first = next((p.row for p in story.passages if p.row is not None and p.row["root_trajectory"] == name), None)
    text = Text(f"session {name}", "bold" if name == story.subject.trajectory else "")
    if first is not None:
        events = sum(p.row is not None and p.row["root_trajectory"] == name for p in story.passages)
        text.append(f" (attempt {first['attempt']}, {first['split']}, {events} events)", "dim")
    return text


def _passage(tree: Tree, passage: Passage, story: Story, *, again: bool) -> Tree:
    """One event; `again` says that the same one came before."""
    row = passage.row
    if row is None:
        branch = tree.add(Text(f"bytes that are no event {_at(passage)}"))
    else:
        wanted = story.subject.event == row["id"]
        text = Text(f"{row['step']:>3} " if row["source_seq"] is not None else "  - ", "dim")
        text.append(event_line(row), "bold reverse" if wanted else "")
        text.append(f"  {_when(row['event_time'])} {_at(passage)}", "dim")
        branch = tree.add(text)
        if passage.event is not None:
            _governed(branch, passage.event)
        elif not passage.letters:
            branch.add(Text("sent twice, skipped here" if again else "not refined yet", "dim"))
    for letter in passage.letters:
        _add(branch, f"dead letter of {letter['stage']}: {letter['reason']} ({letter['detail']})", letter, style="red")
    return branch


def _governed(tree: Tree, event: Row[Event]) -> None:
    """Only what is out of the ordinary."""
    governance = event["governance"]
    if governance is None:
        return
    if governance["eligibility"] in ("denied", "audit_only"):
        tree.add(Text(f"{governance['eligibility']}: {governance['reason']}", "yellow"))
    if governance["redaction"] != "none_needed":
        found = ", ".join(f"{count} {what}" for what, count in sorted(governance["counts"].items()))
        tree.add(Text(f"redaction {governance['redaction']}: {found or 'no findings'}", "yellow"))


def event_line(row: Row[Event]) -> str:
    """One line about an event."""
    try:
        body = row.body
    except SchemaError:
        return f"{row['kind']} (its body cannot be read)"
    match row["kind"]:
        case "model_call":
            call: ModelCall = body
            try:
                versions = unpack(call["output_versions"])
            except SchemaError:
                return f"model call of policy {row['policy']}, reply {call['response_id']} (its tokens cannot be read)"
            made = f"{len(versions)} tokens"
            if len(versions):
                low, high = int(versions.min()), int(versions.max())
                made += f" of version {low}" if low == high else f" of versions {low} to {high}"
            retry = f", retries {call['supersedes']}" if call["supersedes"] else ""
            barred = "" if call["trainable"] else f", untrainable: {call['untrainable_reason']}"
            partly = f", not whole: {NOT_WHOLE}" if call["opened"] == NOT_WHOLE else ""
            whose = f", identified by {call['identified_by']}" if call["identified_by"] else ""
            return (
                f"model call of policy {row['policy']}, reply {call['response_id']}: {made}, {call['finish_reason']}"
                f"{retry}{barred}{whose}{partly}"
            )
        case "reward":
            reward: Reward = body
            value = f"{reward['value']:.4g}" if reward["value"] is not None else f"missing ({reward['failure']})"
            made = f", made by replay {reward['replay']}: it counts for no sample" if reward["replay"] else ""
            return f"reward {value} from {reward['source']} for {reward['target_kind']} {reward['target']}{made}"
        case "episode_started":
            start: EpisodeStarted = body
            return f"started: task {start['task_id']}, sample {start['sample']} of {start['group_size']}"
        case "episode_ended":
            end: EpisodeEnded = body
            reason = f", {end['reason']}" if end["reason"] else ""
            return f"ended: {end['status']} ({end['stop_condition']}){reason}"
        case "tool_call" | "tool_result":
            tool: ToolCall | ToolResult = body
            return f"{row['kind'].replace('_', ' ')} {tool['name']} ({tool['call_id']})"
        case "gap":
            gap: Gap = body
            return f"gap: {gap['missed']} events lost, {gap['reason']}"
        case kind:
            return str(kind).replace("_", " ")


def _sample(tree: Tree, row: Row[Trajectory]) -> None:
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


def _completion(row: Row[Completion]) -> str:
    count = f"{len(row['samples'])} of {row['size']} samples"
    reason = f": {row['reason']}" if row["reason"] else ""
    return f"group {row['kind'].replace('_', '-')}, {count}{reason}"


def _resolution(row: Row[Resolution]) -> str:
    if row["kind"] == "ready":
        asked = "" if row["solicited"] else ", unsolicited"
        return f"resolved as ready: ticket {row['ticket']}, seq {row['seq']}{asked}"
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
