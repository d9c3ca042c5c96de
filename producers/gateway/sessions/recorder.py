"""Events into the capture log: envelope, step, chain, and a gap marker for what could not be written.

Invariants: an event gets its step and its link only by being in the log; an event that cannot be written, whatever the
reason (a full or broken disk, a body that no schema takes), marks its trajectory as not whole, once per outage in the
log itself (in reserved space), and nothing is raised: serving goes on. The end of an episode may use the reserved space
too; a reply that was under way when the former process died is labelled by a gap, once. What its sender can send again
(`accept`) is refused by a full log and leaves no mark: nothing is lost. Where
capture is `required`, no call begins while the log takes nothing (`check`), and no reply is told whose record is not
written and synced (`ensure_durable`)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import cast

from millrace.dialects.errors import RETRY_AFTER_S, ApiError
from millrace.infra import proof, telemetry
from millrace.producers.capture.entry import Entry
from millrace.producers.capture.log import CaptureLog, LogFull
from millrace.producers.gateway.sessions.session import GatewaySession
from millrace.producers.gateway.sessions.streaming_marks import REPLY, StreamingMarks
from millrace.producers.gateway.spending import Spending
from millrace.schemas import codec, envelope
from millrace.schemas.chain import LONG, LinkPrefix, begin
from millrace.schemas.envelope import Belonging, ChainLink, EventNumber
from millrace.schemas.ids import new_id, now_micros
from millrace.schemas.records import Body, Event, EventKind

logger = logging.getLogger(__name__)

RESERVED_KINDS = {"gap", "episode_ended"}
FULL_REASON = "capture log full"
CUT_OFF = "cut off: the gateway died during this reply, of which its client has a part"
NO_NOTES: Mapping[str, str] = {}
DRAFT_BYTES = 256 << 10
"""bytes of an event from which on an `EventDraft` of it is worth its while"""
_events = telemetry.counter("millrace.gateway.events", "{event}", "events captured, by kind")
_losses = telemetry.counter("millrace.gateway.lost_events", "{event}", "events that could not be captured")


class EventDraft:
    """The long part of an event that is about to be recorded: its body's bytes, and the link up to their end.

    Make it where the event is recorded, call `write` in any thread, and give it to `Recorder.record` with the same
    body. One that was not written in time is made good there."""

    def __init__(self, event: Event, body: Body) -> None:
        self._event = event
        self._body = body
        self.written: tuple[bytes, LinkPrefix | None] | None = None

    def write(self) -> None:
        """Do the work. Never raises: whoever records learns what does not fit."""
        with suppress(Exception):
            data = codec.encode_by_name(codec.BODIES[self._event["kind"]], self._body)
            self.written = (data, begin({**self._event, "body": data}) if len(data) >= LONG else None)


class Recorder:
    """Writes the events of all sessions of one gateway. With a key, rewards carry a proof of who let them in.
    `required`: a reply that cannot be captured is not told."""

    def __init__(
        self,
        log: CaptureLog,
        key: str = "",
        *,
        is_required: bool = False,
        spending: Spending | None = None,
        underway: StreamingMarks | None = None,
    ) -> None:
        self.log = log
        self.spending = spending or Spending({})
        self.underway = underway or StreamingMarks(log.folder)
        self.is_required = is_required
        self.lost: Counter[str] = Counter()
        """events that could not be captured since the start, by kind"""
        self._key = key
        self._unsynced = False

    def record(
        self,
        session: GatewaySession,
        kind: str,
        body: Body,
        *,
        actor: str,
        event_time: int | None = None,
        parent_event: str | None = None,
        draft: EventDraft | None = None,
        notes: Mapping[str, str] = NO_NOTES,
        policy: str | None = None,
    ) -> str | None:
        """Append an event; returns its id, or None when it could not be written and the trajectory is not whole.

        `draft`: what `draft` made of the same body; `notes`: headers that stay in the capture log; `policy`: whose the
        event is, where it is not the session's."""
        try:
            return self._write_event(session, kind, body, actor, event_time, parent_event, draft, notes, policy)
        except LogFull as error:
            if session.is_whole or not session.gap_open:
                logger.error("trajectory %s is no longer whole: %s", session.id, error)
            self.record_gap(session, kind, FULL_REASON, notes)
        return None

    def accept(
        self,
        session: GatewaySession,
        kind: str,
        body: Body,
        *,
        actor: str,
        event_time: int | None = None,
        notes: Mapping[str, str] = NO_NOTES,
    ) -> str | None:
        """`record` for what its sender can send again. Raises ApiError 503 where the log is full, which leaves nothing
        of it; None: no schema takes it, so that it is lost."""
        try:
            return self._write_event(session, kind, body, actor, event_time, None, None, notes)
        except LogFull:
            raise log_full() from None

    def _write_event(
        self,
        session: GatewaySession,
        kind: str,
        body: Body,
        actor: str,
        event_time: int | None,
        parent_event: str | None,
        draft: EventDraft | None,
        notes: Mapping[str, str],
        policy: str | None = None,
    ) -> str | None:
        """Append an event, after the gap that is still to be written. Raises LogFull."""
        try:
            if session.gap_open:
                self._append(session, "gap", {"missed": 1, "reason": FULL_REASON}, "gateway", None, None)
                session.gap_open = False
            return self._append(session, kind, body, actor, event_time, parent_event, draft, notes, policy)
        except LogFull:
            raise
        except Exception as error:
            logger.exception("an event of trajectory %s cannot be written: %s", session.id, kind)
            self.record_gap(session, kind, f"not recordable: {type(error).__name__}", notes)
        return None

    def draft(
        self, session: GatewaySession, kind: str, body: Body, *, actor: str, policy: str | None = None
    ) -> EventDraft:
        """What may be done of an event before its place in the chain is known."""
        return EventDraft(self._event(session, kind, actor, None, None, policy), body)

    def record_gap(self, session: GatewaySession, kind: str, reason: str, notes: Mapping[str, str] = NO_NOTES) -> None:
        """Say in the log that an event is missing; if even that cannot be written, before the next event. `notes`: the
        headers that the event would have had; what they say was spent counts until the gateway stops, where nothing of
        it can be written."""
        _losses.add(1, kind=kind)
        self.lost[kind] += 1
        session.is_whole = False
        try:
            self._append(session, "gap", {"missed": 1, "reason": reason}, "gateway", None, None, notes=notes)
            session.gap_open = False
            return
        except LogFull:
            pass
        except Exception:
            logger.exception("a gap of trajectory %s cannot be written", session.id)
        session.gap_open = True
        self.spending.fold(notes, now_micros())

    def label_cut(self, sessions: Mapping[str, GatewaySession]) -> None:
        """A start: replies that the former process left half told are missing from their live `sessions`. One whose
        session is not live has nobody who could go on from it, and no end that could still say so."""
        for name, trajectory in list(self.underway.left.items()):
            session = sessions.get(trajectory)
            if session is not None:
                logger.warning("trajectory %s is no longer whole: the gateway died during a reply", trajectory)
                self.record_gap(session, "model_call", CUT_OFF, {REPLY: name})
            if session is None or not session.gap_open:
                self.underway.settle(name)

    async def durable(self, session: GatewaySession) -> bool:
        """Return once everything appended so far survives what it should survive, or cannot be made to: False."""
        try:
            await self.log.durable()
        except OSError as error:
            logger.error("trajectory %s may not survive a power cut: %s", session.id, error)
            self._unsynced = True
            self.record_gap(session, "unknown", f"not synced: {type(error).__name__}")
            return False
        return True

    async def ensure_durable(self, session: GatewaySession, *, is_lost: bool) -> None:
        """`durable`, before a reply is told. Raises ApiError 503 where capture is required and its record is lost
        (`is_lost`), or may yet be."""
        is_synced = await self.durable(session)
        if self.is_required and (is_lost or session.gap_open or not is_synced):
            raise capture_down()

    async def down(self) -> str | None:
        """Why nothing could be captured now; None where it could."""
        try:
            self.log.check()
            if self._unsynced:
                await self.log.durable()
                self._unsynced = False
        except (LogFull, OSError) as error:
            return str(error)
        return None

    async def check(self) -> None:
        """A call is about to begin. Raises ApiError 503 where capture is required and nothing could be captured."""
        if self.is_required and (why := await self.down()) is not None:
            logger.error("no call is served, since [gateway] capture is required: %s", why)
            raise capture_down()

    def _append(
        self,
        session: GatewaySession,
        kind: str,
        body: Body,
        actor: str,
        event_time: int | None,
        parent_event: str | None,
        draft: EventDraft | None = None,
        notes: Mapping[str, str] = NO_NOTES,
        policy: str | None = None,
    ) -> str:
        log, event = self.log, self._event(session, kind, actor, event_time, parent_event, policy)
        body_bytes, chain_start = (draft and draft.written) or (codec.encode_by_name(codec.BODIES[kind], body), None)
        event = envelope.link({**event, "body": body_bytes}, chain_start)
        headers = {**envelope.headers_of(event, log.source), **notes}
        if kind == "episode_started":
            headers |= session.origin
        if context := telemetry.context(session.root, session.id):
            headers[telemetry.HEADER] = context
        if kind == "reward" and self._key:
            headers[proof.HEADER] = proof.proof_of(self._key, event["hash"])
        log.append(Entry(session.key, headers, codec.encode("Event", event)), from_reserve=kind in RESERVED_KINDS)
        session.places.append(log.newest)
        if kind == "episode_started":
            session.began = event["capture_time"]  # as a start would read it
        session.follow(kind, event["step"], event["hash"])
        self.spending.fold(notes, event["capture_time"])
        if kind == "episode_ended":
            telemetry.export_own_span("millrace.gateway", session.root, session.id, session.began, steps=session.step)
        _events.add(1, kind=kind)
        return event["id"]

    def _event(
        self,
        session: GatewaySession,
        kind: str,
        actor: str,
        event_time: int | None,
        parent_event: str | None,
        policy: str | None = None,
    ) -> Event:
        """An event as it would be appended now, without its body and link."""
        now, log = now_micros(), self.log
        belonging = Belonging(
            tenant=session.tenant,
            policy=policy or session.policy,
            group=session.group,
            root=session.root,
            trajectory=session.id,
            attempt=session.attempt,
            split=session.split,
            trace_id=session.root.replace("-", ""),
            parent=session.parent,
            spawn_call=session.spawn_call,
        )
        return envelope.draft(
            belonging,
            cast(EventKind, kind),
            b"",
            id=new_id(),
            actor=actor,
            number=EventNumber(log.identity.source, log.identity.epoch, log.end),
            after=ChainLink(session.step, session.link),
            event_time=event_time or now,
            capture_time=now,
            parent_event=parent_event,
        )


def capture_down() -> ApiError:
    """Nothing is served that is not captured."""
    message = "This gateway serves no call that it cannot capture, and its capture log takes nothing now: try again"
    return ApiError(503, message, type="server_error", code="capture_down", retry_after_s=RETRY_AFTER_S)


def log_full() -> ApiError:
    """The log takes nothing: what was sent is not recorded."""
    return ApiError(503, "The capture log is full: try again later", type="server_error", code="log_full")
