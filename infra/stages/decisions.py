"""Decisions about settings: those that this program asks for itself, as the file that it was started with says, and
those of a policy that lie in the log.

Invariant: the id follows from everything else that the decision says, and the key is that of its policy, so that an
audit sees a change of any field. Whoever else decides something may name it as they like, but not by a uuid of version
5: by that kind the audit knows ours, whatever was made of the author."""

from __future__ import annotations

import json
from collections.abc import Iterator

from millrace.infra.log.base import Bus, Outgoing
from millrace.infra.log.history.kinds import DECISIONS
from millrace.infra.log.history.reader import History
from millrace.infra.log.history.rows import Row
from millrace.infra.stages.letters import made_id
from millrace.schemas import codec
from millrace.schemas.ids import Micros
from millrace.schemas.records import Decision

AUTHOR = "millrace"
REASON = "as its settings say"


def setting(policy: str, name: str, value: object, now: Micros) -> Decision:
    """The decision that gives a policy's setting a value, which is JSON."""
    decision: Decision = {
        "id": "",
        "kind": "setting",
        "policy": policy,
        "name": name,
        "value": json.dumps(value),
        "reason": REASON,
        "author": AUTHOR,
        "time": now,
    }
    return {**decision, "id": id_of(decision)}


def id_of(decision: Decision) -> str:
    """The id that follows from the rest of a decision."""
    words = [decision["policy"], decision["name"], decision["value"], decision["reason"], decision["author"]]
    return made_id("decision", json.dumps([decision["kind"], *words, decision["time"]]))


def key_of(decision: Decision) -> bytes:
    """The key that a decision lies under."""
    return (decision["policy"] or "").encode()


def outgoing(topic: str, decision: Decision) -> Outgoing:
    """The record of a decision; `topic` is a full name."""
    return Outgoing(topic, key_of(decision), codec.encode("Decision", decision))


def settings_of(bus: Bus, namespace: str, policy: str) -> Iterator[Row[Decision]]:
    """The decisions about settings of a policy, in the order of the log. A record that is none is named in the log of
    this process and passed over."""
    for row in History(bus, namespace, policy, is_bounded=True).rows(DECISIONS):
        if (row["kind"], row["policy"]) == ("setting", policy):
            yield row
