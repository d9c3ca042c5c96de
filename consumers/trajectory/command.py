"""`millrace trajectory` and `millrace lineage`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import RenderableType

from millrace.consumers.trajectory import page, tree
from millrace.consumers.trajectory.account import Account, account, finite
from millrace.consumers.trajectory.ancestry import of_task, of_trajectory, of_version
from millrace.consumers.trajectory.branches import task_tree, trajectory_tree, version_tree
from millrace.consumers.trajectory.find import FoundTrajectory, candidates
from millrace.consumers.trajectory.tokens import Spell
from millrace.consumers.why.find import Subject
from millrace.consumers.why.read import PolicyTopics
from millrace.consumers.why.story import tell
from millrace.infra import durable
from millrace.infra.config import Settings
from millrace.infra.connect import claims, history
from millrace.infra.errors import LookError, MillraceError
from millrace.infra.log.base import Bus
from millrace.infra.log.history.kinds import WEIGHTS
from millrace.infra.log.history.rows import Resolve, as_stored
from millrace.infra.terminal import clean

_VERSION = re.compile(r"(?:(?P<policy>[\w.-]+)@|v)?(?P<number>\d{1,18})")
MOST = 20
"""candidates that are named"""


class Shown(NamedTuple):
    """An answer for people and for programs."""

    tree: RenderableType
    json: dict[str, Any]


def show(
    settings: Settings, wanted: str, *, tokens: bool = False, tokenizer: Path | None = None, out: Path | None = None
) -> Shown:
    """One trajectory by the id of it, of its attempt, of an event or call in it, or by a place. tokens: token by token;
    tokenizer: a model directory whose tokenizer spells them, else a kept version's; out: also write the page there.

    Raises LookError where nothing or several things are meant, BusError when the log cannot be read."""
    with history(settings) as bus:
        resolve = claims(settings).resolve
        topics = PolicyTopics(bus, settings.namespace, settings.policy.name, resolve)
        told = told_of(topics, wanted)
        needed = tokens or out is not None
        spell = speller(tokenizer, topics) if needed else None
        if out is not None:
            durable.write(out, page.render(told, spell), sync=False)
    return Shown(tree.tree(told, tokens=tokens, spell=spell), told.as_json())


def told_of(topics: PolicyTopics, wanted: str) -> Account:
    """The account of the one trajectory that is meant. Raises LookError."""
    found = one_of(candidates(topics, wanted), wanted, topics)
    subject = Subject(found.id, "trajectory", found.group, found.key, None, found.id)
    return account(tell(topics, subject), found)


def one_of(found: Sequence[FoundTrajectory], wanted: str, topics: PolicyTopics) -> FoundTrajectory:
    """The one candidate. Raises LookError for none or several, which it names."""
    if len(found) == 1:
        return found[0]
    if not found:
        others = sorted(topics.others(wanted))
        if others:
            ask = f"ask with `--set policy.name={others[0]}` in front"
            raise LookError(f"{wanted!r} is of policy {' and '.join(others)}, not of {topics.policy}: {ask}")
        raise LookError(
            f"nothing is known of {wanted!r} in policy {topics.policy}: give the id of a trajectory, attempt, event or "
            "call, or a place as topic[partition]@offset; ids are compared whole"
        )
    lines = [f"  {one.id}  group {one.group}, tenant {one.tenant}, attempt {one.attempt}" for one in found[:MOST]]
    rest = f"\n  and {len(found) - MOST} more" if len(found) > MOST else ""
    named = "\n".join(lines)
    raise LookError(clean(f"{wanted!r} names {len(found)} trajectories; ask for one of them:\n{named}{rest}"))


def lineage(settings: Settings, wanted: str, *, task: bool = False) -> Shown:
    """The lineage of a version, a trajectory or a task. task: it is the id of a task, whatever it looks like.

    Raises LookError where nothing or several things are meant, BusError when the log cannot be read."""
    with history(settings) as bus:
        resolve = claims(settings).resolve
        return lineage_in(bus, settings.namespace, settings.policy.name, wanted, resolve, task=task)


def lineage_in(
    bus: Bus, namespace: str, policy: str, wanted: str, resolve: Resolve = as_stored, *, task: bool = False
) -> Shown:
    """The same for any bus. A version as policy@version may be of any policy of the deployment."""
    topics = PolicyTopics(bus, namespace, policy, resolve)
    named = _VERSION.fullmatch(wanted)
    if not task and named and named["policy"] not in (None, policy) and named["policy"] in topics.policies():
        policy, topics = named["policy"], topics.of(named["policy"])
    version = int(named["number"]) if named and named["policy"] in (None, policy) else None
    if not task and version is not None and (found := of_version(topics, version)) is not None:
        return Shown(version_tree(found), _json("version", asdict(found)))
    if (of := of_task(topics, wanted)) is not None:
        return Shown(task_tree(of, policy), _json("task", asdict(of)))
    if task:
        raise LookError(f"no task {wanted!r} was granted or answered in policy {policy}: ids are compared whole")
    if version is not None:
        newest = max((row["version"] for row in topics.rows(WEIGHTS)), default=None)
        known = "it has no version" if newest is None else f"its newest is {newest}"
        raise LookError(f"policy {policy} has no version {wanted}: {known}")
    one = one_of(candidates(topics, wanted), wanted, topics)
    sealed = of_trajectory(topics, one)
    if sealed is None:
        raise LookError(f"trajectory {one.id} is not sealed, so nothing trained on it: ask `millrace why {one.id}`")
    return Shown(trajectory_tree(sealed, policy), _json("trajectory", asdict(sealed)))


def _json(kind: str, found: dict[str, Any]) -> dict[str, Any]:
    return {"kind": kind, **finite(found)}


def speller(directory: Path | None, topics: PolicyTopics) -> Spell | None:
    """What spells tokens: the tokenizer of a directory, else that of the newest version whose files are here; None
    where there is none. Raises ConfigError for a directory without a tokenizer."""
    from millrace.dialects.rendering.tokenizer import ChatTokenizer

    if directory is not None:
        return ChatTokenizer(directory).text
    for uri in reversed([row["uri"] for row in topics.rows(WEIGHTS)]):
        folder = Path(uri.removeprefix("file://"))
        try:
            if (folder / "tokenizer.json").is_file():
                return ChatTokenizer(folder).text
        except (MillraceError, OSError, ValueError):
            continue
    return None
