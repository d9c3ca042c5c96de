"""Events into the capture log: envelope, step, chain, and a gap marker where the disk was full.

Invariants: an event gets its step and its link only by being in the log; an event that does not fit marks its
trajectory as not whole, once per outage in the log itself (in reserved space), and nothing is raised: serving goes on.
The end of an episode may use the reserved space too."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from infra import telemetry
from infra.chain import event_hash
from producers.capture.entry import Entry
from producers.capture.log import CaptureLog, LogFull
from producers.gateway.session import Session
from schemas import codec
from schemas.ids import new_id, now_micros

logger = logging.getLogger(__name__)

RESERVED = {"gap", "episode_ended"}
_events = telemetry.counter("millrace.gateway.events", "{event}", "events captured, by kind")
_lost = telemetry.counter("millrace.gateway.lost_events", "{event}", "events that did not fit into the capture log")


class Recorder:
    """Writes the events of all sessions of one gateway."""

    def __init__(self, log: CaptureLog) -> None:
        self.log = log

    def record(
        self,
        session: Session,
        kind: str,
        body: Mapping[str, Any],
        *,
        actor: str,
        event_time: int | None = None,
        parent_event: str | None = None,
    ) -> str | None:
        """Append an event; returns its id, or None when it did not fit and the trajectory is no longer whole."""
        try:
            if session.gap_open:
                self._append(session, "gap", {"missed": 1, "reason": "capture log full"}, "gateway", None, None)
                session.gap_open = False
            return self._append(session, kind, body, actor, event_time, parent_event)
        except LogFull as error:
            _lost.add(1, kind=kind)
            if session.whole or not session.gap_open:
                logger.error("trajectory %s is no longer whole: %s", session.id, error)
            self._mark(session)
            return None

    def _mark(self, session: Session) -> None:
        """Say in the log that something is missing; if even that does not fit, before the next event."""
        session.whole = False
        try:
            self._append(session, "gap", {"missed": 1, "reason": "capture log full"}, "gateway", None, None)
            session.gap_open = False
        except LogFull:
            session.gap_open = True

    def _append(
        self,
        session: Session,
        kind: str,
        body: Mapping[str, Any],
        actor: str,
        event_time: int | None,
        parent_event: str | None,
    ) -> str:
        now, log = now_micros(), self.log
        event: dict[str, Any] = {
            "id": new_id(),
            "kind": kind,
            "tenant": session.tenant,
            "policy": session.policy,
            "group": session.group,
            "root_trajectory": session.root,
            "trajectory": session.id,
            "parent_trajectory": session.parent,
            "parent_event": parent_event,
            "spawn_call": session.spawn_call,
            "attempt": session.attempt,
            "step": session.step,
            "actor": actor,
            "split": session.split,
            "event_time": event_time or now,
            "capture_time": now,
            "log_time": None,
            "source": log.identity.source,
            "source_epoch": log.identity.epoch,
            "source_seq": log.end,
            "prev_hash": session.link,
            "source_place": None,
            "source_hash": None,
            "trace_id": session.root.replace("-", ""),
            "span_id": None,
            "governance": None,
            "body_encoding": "plain",
            "body": codec.encode_body(kind, body),
        }
        event["hash"] = event_hash(session.link, event)
        headers = {
            "id": event["id"],
            "kind": kind,
            "policy": session.policy,
            "group": session.group,
            "trajectory": session.id,
            "source": log.source,
            "source-seq": str(log.end),
        }
        if context := telemetry.context(session.root, session.id):
            headers[telemetry.HEADER] = context
        log.append(Entry(session.key, headers, codec.encode("Event", event)), reserved=kind in RESERVED)
        session.followed(kind, event["step"], event["hash"])
        if kind == "episode_ended":
            telemetry.own("millrace.gateway", session.root, session.id, session.began, steps=session.step)
        _events.add(1, kind=kind)
        return str(event["id"])
