"""What the settings file asks of dispatch, written to `decisions` once for each edit.

Version 0 fixes what a policy begins with; from then on a setting changes by a decision, so an edit of the file has to
become one.

Invariants:

- An edit is asked for once. What somebody else decided since then stands until the file is edited again.
- Nothing is asked for before version 0 exists: it takes what the file says then.
- Nothing that lies in the log ends it: what is no record, or holds no value, is passed over.
- Whoever dies between two decisions has asked for the first alone; the next start asks for the rest.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, Final

from millrace.infra import faults
from millrace.infra.config import Settings
from millrace.infra.log.base import Bus, Record
from millrace.infra.log.history.kinds import RESOLUTIONS, WEIGHTS
from millrace.infra.log.history.reader import History
from millrace.infra.log.readable import passed_over
from millrace.infra.log.topics import full_name
from millrace.infra.stages.decisions import AUTHOR, outgoing, setting, settings_of
from millrace.schemas.ids import now_micros
from millrace.schemas.json_values import Json, JsonObject

log = logging.getLogger(__name__)

NO_VALUE: Final = object()


def asked_by(settings: Settings) -> JsonObject:
    """What the settings ask of dispatch, by the name of the decision."""
    policy = settings.policy
    return {
        "batch": policy.batch,
        "eta": policy.eta,
        "group_size": policy.group_size,
        "release": policy.release,
        "unsolicited_share": share_of(settings),
        "lease_ms": int(policy.lease_s * 1000),
        "dynamic_sampling": policy.dynamic_sampling,
    }


def share_of(settings: Settings) -> float:
    """The share of a batch that production traffic may take: all of it where no agent runs tasks, since nothing else
    would fill the batch and the policy would never train."""
    share = settings.policy.unsolicited_share
    return 1.0 if share and not settings.rollout.agent else share


def announce(settings: Settings, bus: Bus) -> list[str]:
    """Ask for every setting that the file says otherwise than it did when it was last asked; gives their names."""
    asks = asked_by(settings)
    former = _last_asks(settings, bus)
    if not asks.keys() <= former.keys():
        began = _begun_with(settings, bus, asks)
        if began is None:
            return []
        former = {**began, **former}
    changes = [name for name, value in asks.items() if name not in former or former[name] != value]
    topic, policy = full_name(settings.namespace, "decisions"), settings.policy.name
    with bus.publisher() as publisher:
        for name in changes:
            publisher.publish(outgoing(topic, setting(policy, name, asks[name], now_micros()))).result()
            faults.point("announce.asked")
    if changes:
        log.info("the settings file changed: dispatch is asked for %s", {name: asks[name] for name in changes})
    return changes


def _last_asks(settings: Settings, bus: Bus) -> JsonObject:
    """The values that the file last asked for, by name."""
    values: JsonObject = {}
    for decision in settings_of(bus, settings.namespace, settings.policy.name):
        if decision["author"] == AUTHOR and decision["name"] in asked_by(settings):
            value = _value(decision.raw, decision["value"])
            if value is not NO_VALUE:
                values[decision["name"]] = value
    return values


def _value(record: Record, text: str) -> Any:
    """The value that a setting of the log holds, NOTHING where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        passed_over(record, "its value is no JSON")
        return NO_VALUE


def _begun_with(settings: Settings, bus: Bus, asks: Mapping[str, Json]) -> JsonObject | None:
    """What the policy began with, None where it has not begun.

    The group size is in version 0. The rest dispatch says first of all in `resolutions`; before it does, B and eta are
    in version 0 too, and dispatch takes what is left from the very settings that are compared here. What retention has
    deleted is not in the answer."""
    policy = settings.policy.name
    history = History(bus, settings.namespace, policy, is_bounded=True)
    event = next((row for row in history.rows(WEIGHTS) if (row["version"], row["policy"]) == (0, policy)), None)
    if event is None:
        return None
    values: JsonObject = {"group_size": event["group_size"] or 1}
    has_announced = False
    for row in history.rows(RESOLUTIONS):
        announcement = row["setting"]
        if announcement is not None and announcement["decision"] is None:
            value = _value(row.raw, announcement["value"])
            if value is NO_VALUE:
                continue
            has_announced = True
            values.setdefault(announcement["name"], value)
        if asks.keys() <= values.keys():
            return values
    if has_announced or bus.starts(history.names[RESOLUTIONS])[0] > 0:
        return values
    return {**asks, **values, "batch": event["batch"], "eta": event["eta"]}
