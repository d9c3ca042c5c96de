"""The lineage of a version, trajectory or task as a tree for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text
from rich.tree import Tree

from millrace.consumers.report.page import spans
from millrace.consumers.trajectory.ancestry import Member, TaskLineage, TrajectoryLineage, VersionLineage, summed

SHOWN = 20
"""members of one list that are named"""


def version_tree(found: VersionLineage) -> Tree:
    """A version: what came before it, what trained it, what came of it."""
    root = Tree(Text(f"version {found.version} of {found.policy}  {found.digest[:12]}", "bold"))
    back = root.add(Text("from", "bold cyan"))
    back.add(Text(f"versions {_spans(found.parents)}" if found.parents else "no version: it is the first"))
    together = summed(found.members)
    for name in ("tenants", "engines"):
        if together[name]:
            back.add(Text(f"{name}: {_counted(together[name])}"))
    if together["sampled"]:
        back.add(Text(f"sampled by versions: {_counted(together['sampled'], 'tokens')}"))
    if found.groups:
        trained = back.add(Text(f"{len(found.groups)} groups, {len(found.members)} trajectories"))
        for group in found.groups[:SHOWN]:
            lost = f", lost: {group.lost}" if group.lost else ""
            gone = f", {group.gone} not in the log any more" if group.gone else ""
            branch = trained.add(Text(f"seq {group.seq}, ticket {group.ticket}, group {group.id}{lost}{gone}"))
            _members(branch, group.members)
        _more(trained, len(found.groups))
    ahead = root.add(Text("to", "bold cyan"))
    ahead.add(Text(f"trained on by versions {_spans(found.children)}" if found.children else "no later version"))
    for into, groups in found.reached.items():
        ahead.add(Text(f"version {into} trained on {groups} group{'s' * (groups != 1)} sampled around it"))
    if found.waiting:
        ahead.add(Text(f"{found.waiting} group{'s' * (found.waiting != 1)} sampled around it, waiting for a batch"))
    return root


def trajectory_tree(found: TrajectoryLineage) -> Tree:
    """A trajectory: what sampled it, what trained on it."""
    member = found.member
    root = Tree(Text(f"trajectory {member.id} of task {member.task}, group {member.group}", "bold"))
    back = root.add(Text("from", "bold cyan"))
    back.add(Text(f"sampled by versions: {_counted(member.sampled, 'tokens') or 'none'}"))
    if found.parents:
        back.add(Text(f"which descend from versions {_spans(found.parents)}"))
    back.add(Text(f"engines: {', '.join(member.engines) or 'not in the log any more'}"))
    ahead = root.add(Text("to", "bold cyan"))
    ahead.add(Text(f"trained version {member.trained}" if member.trained is not None else "trained no version"))
    if found.children:
        ahead.add(Text(f"from which versions {_spans(found.children)} descend"))
    return root


def task_tree(found: TaskLineage) -> Tree:
    """A task: who answered it, and what trained on the answers."""
    root = Tree(Text(f"task {found.task}: {len(found.members)} trajectories", "bold"))
    together = summed(found.members)
    if found.tickets:
        root.add(Text(f"tickets {_spans(found.tickets)}"))
    for kind, count in found.unfinished.items():
        root.add(Text(f"{count} {kind}", "yellow"))
    for name, words, unit in (
        ("tenants", "tenants", ""),
        ("engines", "engines", ""),
        ("sampled", "answered by versions", "tokens"),
        ("trained", "trained versions", ""),
    ):
        if together[name]:
            root.add(Text(f"{words}: {_counted(together[name], unit)}"))
    _members(root, found.members)
    return root


def _members(parent: Tree, members: Sequence[Member]) -> None:
    for member in members[:SHOWN]:
        reward = "no reward" if member.reward is None else f"reward {member.reward:.4g}"
        into = f", trained version {member.trained}" if member.trained is not None else ""
        sampled = f", sampled by {_spans(tuple(member.sampled))}" if member.sampled else ""
        parent.add(Text(f"{member.id}: {member.split}, task {member.task}, {reward}{sampled}{into}"))
    _more(parent, len(members))


def _more(parent: Tree, many: int) -> None:
    if many > SHOWN:
        parent.add(Text(f"and {many - SHOWN} more: --json names them all", "dim"))


def _spans(numbers: Sequence[int]) -> str:
    return spans(sorted(numbers))


def _counted(found: dict[Any, int], unit: str = "") -> str:
    unit = f" {unit}" if unit else ""
    shown = [f"{name} ({count:,}{unit})" for name, count in list(found.items())[:SHOWN]]
    return ", ".join(shown) + (f" and {len(found) - SHOWN} more" if len(found) > SHOWN else "")
