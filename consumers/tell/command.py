"""`millrace why`, `trajectory`, `lineage` and `report`: what the log says is read once, and shown as text, tree, page
or JSON.

Invariant: a page is written by one rename, for nobody but its owner to read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import RenderableType

from millrace.consumers.audit import AuditReport, audit
from millrace.consumers.tell.account import Account, Spell, account
from millrace.consumers.tell.descent import of_task, of_trajectory, of_version
from millrace.consumers.tell.descent_tree import task_tree, trajectory_tree, version_tree
from millrace.consumers.tell.pages import account_page, report_page
from millrace.consumers.tell.story import tell
from millrace.consumers.tell.subject import EpisodeIds, Subject, episodes, find
from millrace.consumers.tell.summary import summary
from millrace.consumers.tell.topics import PolicyTopics
from millrace.consumers.tell.trees import account_tree, story_tree
from millrace.infra import durable
from millrace.infra.config import Settings
from millrace.infra.connect import claims, history
from millrace.infra.errors import LookError, MillraceError
from millrace.infra.log.base import Bus
from millrace.infra.log.history.kinds import WEIGHTS
from millrace.infra.log.history.rows import Resolve, as_stored
from millrace.infra.terminal import Terminal, clean, finite

VERSION = re.compile(r"(?:(?P<policy>[\w.-]+)@|v)?(?P<number>\d{1,18})")
MOST = 20
"""candidates that are named"""
MOST_TICKETS = 5
"""tickets of one prompt that are told"""


class WhyAnswer(NamedTuple):
    """What became of something, as text; `is_known`: whether anything is known of it."""

    text: str
    is_known: bool


class TreeAnswer(NamedTuple):
    """An answer for people and for programs."""

    tree: RenderableType
    json: dict[str, Any]


@contextmanager
def open_topics(settings: Settings) -> Iterator[PolicyTopics]:
    """The topics of the configured policy. Raises BusError when the log cannot be read."""
    with history(settings) as bus:
        yield PolicyTopics(bus, settings.namespace, settings.policy.name, claims(settings).resolve)


def explain(settings: Settings, id: str, *, text: bool = False, width: int | None = None) -> WhyAnswer:
    """What became of an event, reply, call, session, group, ticket, prompt or reward. text: with what was said; width:
    of the terminal that shows it, None where lines may be of any width.

    Raises BusError when the log cannot be read."""
    with open_topics(settings) as topics:
        return explain_in(topics, id, text=text, width=width)


def explain_in(topics: PolicyTopics, id: str, *, text: bool = False, width: int | None = None) -> WhyAnswer:
    """The same for topics that are open."""
    id = id.strip()
    subject = find(topics, id) if id else None
    if subject is None:
        return WhyAnswer(clean(_unknown(topics, id)), is_known=False)
    tickets = [find(topics, str(ticket)) for ticket in subject.tickets[:MOST_TICKETS]]
    out = StringIO()
    console = Terminal(file=out, width=width, highlight=False)
    for one in [subject, *(replace(ticket, kind="ticket") for ticket in tickets if ticket is not None)]:
        console.print(story_tree(tell(topics, one), text=text))
    if rest := ", ".join(map(str, subject.tickets[MOST_TICKETS:])):
        return WhyAnswer(f"{out.getvalue().rstrip()}\nand tickets {rest}: ask for one of them", is_known=True)
    return WhyAnswer(out.getvalue().rstrip(), is_known=True)


def _unknown(topics: PolicyTopics, id: str) -> str:
    """What to say of an id that names nothing in this policy."""
    if id and (policies := sorted(topics.other_policies(id))):
        return (
            f"{id!r} is of policy {' and '.join(policies)}, not of {topics.policy}: "
            f"ask `millrace --set policy.name={policies[0]} why {id}`."
        )
    return (
        f"Nothing is known of {id!r} in {topics.namespace}: no event, reply, call, session, group, ticket, prompt or "
        f"reward of policy {topics.policy} has this id. Ids are compared whole; raw events are kept for a short time "
        "only."
    )


def show(
    settings: Settings, id: str, *, tokens: bool = False, tokenizer: Path | None = None, out: Path | None = None
) -> TreeAnswer:
    """One trajectory by the id of it, of its attempt, of an event or call in it, or by a place. tokens: token by token;
    tokenizer: a model directory whose tokenizer spells them, else a kept version's; out: also write the page there.

    Raises LookError where nothing or several things are meant, BusError when the log cannot be read."""
    with open_topics(settings) as topics:
        episode = account_of(topics, id)
        spell = speller(tokenizer, topics) if tokens or out is not None else None
        if out is not None:
            durable.write(out, account_page(episode, spell), sync=False)
    return TreeAnswer(account_tree(episode, tokens=tokens, spell=spell), episode.as_json())


def account_of(topics: PolicyTopics, id: str) -> Account:
    """The account of the one trajectory that is meant. Raises LookError."""
    ids = one_of(episodes(topics, id), id, topics)
    return account(tell(topics, Subject(ids.id, "trajectory", ids.group, ids.key, None, ids.id)), ids)


def one_of(candidates: Sequence[EpisodeIds], id: str, topics: PolicyTopics) -> EpisodeIds:
    """The one candidate. Raises LookError for none or several, which it names."""
    if len(candidates) == 1:
        return candidates[0]
    if not candidates:
        if policies := sorted(topics.other_policies(id)):
            ask = f"ask with `--set policy.name={policies[0]}` in front"
            raise LookError(f"{id!r} is of policy {' and '.join(policies)}, not of {topics.policy}: {ask}")
        raise LookError(
            f"nothing is known of {id!r} in policy {topics.policy}: give the id of a trajectory, attempt, event or "
            "call, or a place as topic[partition]@offset; ids are compared whole"
        )
    lines = [f"  {one.id}  group {one.group}, tenant {one.tenant}, attempt {one.attempt}" for one in candidates[:MOST]]
    lines += [f"  and {len(candidates) - MOST} more"] if len(candidates) > MOST else []
    names = "\n".join(lines)
    raise LookError(clean(f"{id!r} names {len(candidates)} trajectories; ask for one of them:\n{names}"))


def lineage(settings: Settings, id: str, *, task: bool = False) -> TreeAnswer:
    """The lineage of a version, a trajectory or a task. task: it is the id of a task, whatever it looks like.

    Raises LookError where nothing or several things are meant, BusError when the log cannot be read."""
    with open_topics(settings) as topics:
        return lineage_in(topics, id, task=task)


def lineage_in(topics: PolicyTopics, id: str, *, task: bool = False) -> TreeAnswer:
    """The same for topics that are open. A version as policy@version may be of any policy of the deployment."""
    policy = topics.policy
    match = VERSION.fullmatch(id)
    if not task and match and match["policy"] not in (None, policy) and match["policy"] in topics.policies():
        policy, topics = match["policy"], topics.of(match["policy"])
    version = int(match["number"]) if match and match["policy"] in (None, policy) else None
    if not task and version is not None and (of := of_version(topics, version)) is not None:
        return TreeAnswer(version_tree(of), {"kind": "version", **finite(asdict(of))})
    if (answers := of_task(topics, id)) is not None:
        return TreeAnswer(task_tree(answers, policy), {"kind": "task", **finite(asdict(answers))})
    if task:
        raise LookError(f"no task {id!r} was granted or answered in policy {policy}: ids are compared whole")
    if version is not None:
        newest = max((row["version"] for row in topics.rows(WEIGHTS)), default=None)
        hint = "it has no version" if newest is None else f"its newest is {newest}"
        raise LookError(f"policy {policy} has no version {id}: {hint}")
    one = one_of(episodes(topics, id), id, topics)
    trajectory = of_trajectory(topics, one)
    if trajectory is None:
        raise LookError(f"trajectory {one.id} is not sealed, so nothing trained on it: ask `millrace why {one.id}`")
    return TreeAnswer(trajectory_tree(trajectory, policy), {"kind": "trajectory", **finite(asdict(trajectory))})


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


def report(settings: Settings, out: Path, *, files: bool = False) -> AuditReport:
    """Write the page of the configured policy to `out`, computed from topics alone; gives the audit that is in it.

    files: also hash every kept checkpoint. Raises AuditError when the policy has no topics, BusError when the log
    cannot be read."""
    with history(settings) as bus:
        names = (settings.namespace, settings.policy.name)
        resolve = claims(settings).resolve
        return report_in(bus, *names, out, settings.policy.release, resolve, files=files, root=settings.weights)


def report_in(
    bus: Bus,
    namespace: str,
    policy: str,
    out: Path,
    release: str = "reserve",
    resolve: Resolve = as_stored,
    *,
    files: bool = False,
    root: str = "",
) -> AuditReport:
    """The same for any bus. release: the policy's first release policy; resolve: reads claims of large records; root:
    where the policy's versions lie now."""
    report = audit(bus, namespace, policy, release=release, resolve=resolve, files=files, root=root)
    durable.write(out, report_page(summary(bus, namespace, policy, resolve=resolve), report), sync=False)
    return report
