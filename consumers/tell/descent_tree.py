"""The lineage of a version, trajectory or task as a tree for a terminal. Pure.

Versions of the policy that is asked about are plain numbers, those of another stand as policy@version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.text import Text
from rich.tree import Tree

from millrace.consumers.tell.descent import (
    FamilyVersion,
    LineageGroup,
    LineageMember,
    TaskLineage,
    TrajectoryLineage,
    VersionLineage,
    totals,
)
from millrace.consumers.tell.notation import spans

MOST_ROWS = 20
"""members of one list that are named"""


def version_tree(lineage: VersionLineage) -> Tree:
    """A version: what came before it, what trained it, what came of it."""
    home = lineage.policy
    root = Tree(Text(f"version {lineage.version} of {home}  {lineage.digest[:12]}", "bold"))
    back = root.add(Text("from", "bold cyan"))
    back.add(Text(f"versions {_versions(lineage.parents, home)}" if lineage.parents else "no version: it is the first"))
    together = totals(lineage.members)
    for name in ("tenants", "engines"):
        if together[name]:
            back.add(Text(f"{name}: {_counts(together[name])}"))
    if together["sampled"]:
        back.add(Text(f"sampled by versions: {_counts(_by_name(together['sampled'], home), 'tokens')}"))
    if lineage.groups:
        node = back.add(Text(f"{len(lineage.groups)} groups, {len(lineage.members)} trajectories"))
        for group in lineage.groups[:MOST_ROWS]:
            _members(node.add(Text(_group(group))), group.members, home)
        _more(node, len(lineage.groups))
    ahead = root.add(Text("to", "bold cyan"))
    children = f"trained on by versions {_versions(lineage.children, home)}" if lineage.children else "no later version"
    ahead.add(Text(children))
    for into in lineage.reached:
        name = _version(FamilyVersion(into.policy, into.version), home)
        ahead.add(Text(f"version {name} trained on {into.groups} group{'s' * (into.groups != 1)} sampled around it"))
    if lineage.waiting:
        ahead.add(Text(f"{lineage.waiting} group{'s' * (lineage.waiting != 1)} sampled around it, waiting for a batch"))
    return root


def _group(group: LineageGroup) -> str:
    """What a group is called: a branch takes nothing of the order of learning, and answers no ticket."""
    names = [
        f"seq {group.seq}" if group.seq is not None else "",
        f"ticket {group.ticket}" if group.ticket is not None else "",
    ]
    loss = f"lost: {group.lost}" if group.lost else ""
    gap = f"{group.gone} not in the log any more" if group.gone else ""
    return ", ".join(filter(None, [*names, f"group {group.id}", loss, gap]))


def trajectory_tree(lineage: TrajectoryLineage, home: str) -> Tree:
    """A trajectory: what sampled it, what trained on it. home: the policy that is asked about."""
    member = lineage.member
    root = Tree(Text(f"trajectory {member.id} of task {member.task}, group {member.group}", "bold"))
    back = root.add(Text("from", "bold cyan"))
    counts = {_version(FamilyVersion(member.policy, number), home): many for number, many in member.sampled.items()}
    back.add(Text(f"sampled by versions: {_counts(counts, 'tokens') or 'none'}"))
    if lineage.parents:
        back.add(Text(f"which descend from versions {_versions(lineage.parents, home)}"))
    back.add(Text(f"engines: {', '.join(member.engines) or 'not in the log any more'}"))
    ahead = root.add(Text("to", "bold cyan"))
    ahead.add(Text(_training(member, home) or "trained no version"))
    if lineage.children:
        ahead.add(Text(f"from which versions {_versions(lineage.children, home)} descend"))
    return root


def task_tree(lineage: TaskLineage, home: str) -> Tree:
    """A task: who answered it, and what trained on the answers. home: the policy that is asked about."""
    root = Tree(Text(f"task {lineage.task}: {len(lineage.members)} trajectories", "bold"))
    together = totals(lineage.members)
    if lineage.tickets:
        root.add(Text(f"tickets {spans(lineage.tickets)}"))
    for kind, count in lineage.unfinished.items():
        root.add(Text(f"{count} {kind}", "yellow"))
    for name, words, unit in (
        ("tenants", "tenants", ""),
        ("engines", "engines", ""),
        ("sampled", "answered by versions", "tokens"),
        ("trained", "trained versions", ""),
    ):
        if together[name]:
            counts = _by_name(together[name], home) if name in ("sampled", "trained") else together[name]
            root.add(Text(f"{words}: {_counts(counts, unit)}"))
    _members(root, lineage.members, home)
    return root


def _members(parent: Tree, members: Sequence[LineageMember], home: str) -> None:
    for member in members[:MOST_ROWS]:
        reward = "no reward" if member.reward is None else f"reward {member.reward:.4g}"
        into = f", {_training(member, home)}" if member.trained else ""
        versions = [FamilyVersion(member.policy, number) for number in member.sampled]
        source = f", sampled by {_versions(versions, home)}" if versions else ""
        parent.add(Text(f"{member.id}: {member.split}, task {member.task}, {reward}{source}{into}"))
    _more(parent, len(members))


def _training(member: LineageMember, home: str) -> str:
    """The versions that trained on it; nothing where there is none."""
    many = "s" * (len(member.trained) != 1)
    return f"trained version{many} {_versions(member.trained, home)}" if member.trained else ""


def _more(parent: Tree, many: int) -> None:
    if many > MOST_ROWS:
        parent.add(Text(f"and {many - MOST_ROWS} more: --json names them all", "dim"))


def _version(version: FamilyVersion, home: str) -> str:
    return str(version.version) if version.policy == home else f"{version.policy}@{version.version}"


def _versions(versions: Iterable[FamilyVersion], home: str) -> str:
    """Spans of versions, the policy's OWN first: `0–2, dev@0–30`."""
    sorted_versions = sorted(versions, key=lambda one: (one.policy != home, one))
    return ", ".join(
        ("" if policy == home else f"{policy}@") + spans([one.version for one in some])
        for policy, some in groupby(sorted_versions, key=lambda one: one.policy)
    )


def _by_name(counts: Mapping[FamilyVersion, int], home: str) -> dict[str, int]:
    return {_version(version, home): count for version, count in counts.items()}


def _counts(counts: dict[Any, int], unit: str = "") -> str:
    unit = f" {unit}" if unit else ""
    parts = [f"{name} ({count:,}{unit})" for name, count in list(counts.items())[:MOST_ROWS]]
    return ", ".join(parts) + (f" and {len(counts) - MOST_ROWS} more" if len(counts) > MOST_ROWS else "")
