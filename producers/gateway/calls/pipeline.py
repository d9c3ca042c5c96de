"""The one way of a call, whoever answers it: answered, marked, streamed, recorded, told to its end.

    Call.open, answer or pieces -> mark -> bytes to the client -> Call.close -> records -> synced -> the last bytes

Invariants: everything about a reply is in the capture log before its last byte leaves, and a mark, by which the next
process labels what a killed one left, before its first; what cannot be captured leaves a gap there and never costs the
reply, unless capture is required: then its last byte does not leave; a reply that breaks off, or whose client left, is
recorded as aborted with what came; a call that failed before anything was answered leaves no trace in its session, and
begins no episode; cancelling a call leaves nothing unrecorded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

from millrace.dialects.errors import ApiError
from millrace.infra.process.offload import Step, TurnQueue, by_turns
from millrace.producers.gateway.calls.call import Call, WholeReply
from millrace.producers.gateway.calls.gateway import CallInSession, Gateway
from millrace.producers.gateway.sessions.recorder import DRAFT_BYTES

logger = logging.getLogger(__name__)


class CallPipeline:
    """That of the calls of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._ends = TurnQueue()
        """of calls that are about to be recorded: those that begin meanwhile go first"""

    async def answer(self, call: Call) -> WholeReply:
        """The whole answer, recorded. Raises ApiError."""
        gateway = self.gateway
        try:
            with CallInSession(call.session, call.name):
                reply = await call.answer()
        except asyncio.CancelledError:
            call.break_off(is_unread=True)
            self._record_at_once(call)
            raise
        except ApiError:
            if call.is_answered:
                await self._record(call)
            raise
        finally:
            if not call.is_answered:
                gateway.discard_if_empty(call.session)
        if call.is_answered:
            await self._record(call)
            await gateway.recorder.ensure_durable(call.session, is_lost=call.is_lost)
            call.check()
        return reply

    async def open(self, call: Call) -> WholeReply | None:
        """Ask for a stream: None, or a refusal instead of it. Raises ApiError."""
        gateway = self.gateway
        try:
            with CallInSession(call.session, call.name):
                refusal = await call.open()
        except asyncio.CancelledError:
            call.break_off(is_unread=True)
            self._record_at_once(call)
            raise
        except ApiError:
            gateway.discard_if_empty(call.session)
            raise
        if refusal is not None:
            gateway.discard_if_empty(call.session)
        return refusal

    async def stream(self, call: Call) -> AsyncGenerator[bytes, None]:
        """A stream that is open, what is ready at once together. Raises ApiError before its first bytes only."""
        gateway, is_recorded = self.gateway, False
        try:
            with CallInSession(call.session, call.name):
                async with aclosing(call.pieces()) as pieces:
                    async for piece in pieces:
                        if not call.is_marked:
                            self._mark(call)
                        yield piece
                await call.close()
                is_recorded = True
                await by_turns(self._records(call), self._ends)
            await gateway.recorder.ensure_durable(call.session, is_lost=call.is_lost)
            yield call.end()
        except ApiError as error:
            if not call.is_answered:
                is_recorded = True
                gateway.discard_if_empty(call.session)
                raise
            rest = b"" if is_recorded else call.rest()  # what is not captured is not told to its end
            if not is_recorded:
                is_recorded = True
                await self._record(call)
            yield rest + call.dialect.failure_event(error).sse()
        finally:
            if not is_recorded:
                call.break_off(is_unread=False)
                self._record_at_once(call)
            call.let_go()

    def leave(self, call: Call) -> None:
        """Nobody reads a stream that is open: it is recorded as aborted."""
        call.break_off(is_unread=True)
        self._record_at_once(call)

    def _mark(self, call: Call) -> None:
        """A part of a reply is about to be told before its record. Its episode begins now."""
        call.is_marked = True
        # The mark first: a kill between the two leaves nothing that was begun and has no end.
        self.gateway.recorder.underway.begin(call.name, call.session.id)
        call.is_lost = not self.gateway.ensure_start(call.session)

    # ------------------------------------------------------------------ records

    async def _record(self, call: Call) -> None:
        """Every choice of a call into the log, between which others have their turn. Never raises: a reply is not lost
        to its client because it cannot be captured."""
        with CallInSession(call.session, call.name):
            await by_turns(self._records(call), self._ends)

    def _record_at_once(self, call: Call) -> None:
        for _ in self._records(call):
            pass

    def _records(self, call: Call) -> Iterator[Step]:
        """A step for each choice, and before it one beside the loop where much is to be written; nothing happens
        between the last choice and the end."""
        session, recorder, replies = call.session, self.gateway.recorder, self.gateway.sessions.replies
        call.is_lost = not self.gateway.ensure_start(session) or call.is_lost
        mark = recorder.underway.note(call.name)  # beside the last
        reason = call.unreadable()
        if reason is not None:
            logger.warning("%s of %s: %s", call.name, session.id, reason)
            recorder.record_gap(session, "model_call", reason, call.spending(0) | mark)
        for at in range(call.count if reason is None else 0):
            if at:
                yield None
            notes = call.spending(at) | (mark if at == call.count - 1 else {})
            try:
                reply = call.reply(at)
                replies.note_echo(session, reply)
                body, breach = call.record(at, reply)
                draft = None
                if call.size(reply) >= DRAFT_BYTES:
                    draft = recorder.draft(session, "model_call", body, actor="policy", policy=call.policy)
                    stand = session.stand(call.policy)
                    yield draft.write
                    if session.stand(call.policy) != stand:  # another call of the session was recorded meanwhile
                        draft, (body, breach) = None, call.record(at, reply)
                call.fold(body, reply)  # before it is written: a start folds the same again
            except Exception as error:
                logger.exception("%s of %s cannot be captured", call.name, session.id)
                call.forget()
                call.is_lost = True
                recorder.record_gap(session, "model_call", f"not recordable: {type(error).__name__}", notes)
                continue
            if breach is not None:
                logger.warning("%s of %s: %s from %s", call.name, session.id, breach, body["engine_version"])
                call.distrust()
            id = recorder.record(
                session,
                "model_call",
                body,
                actor="policy",
                event_time=call.when,
                draft=draft,
                notes=notes,
                policy=call.policy,
            )
            call.is_lost = call.is_lost or id is None
            try:
                if not at:
                    self.gateway.followed_up(session, call.messages, call.digests)
                stores = id is not None or not recorder.is_required
                replies.learn(session, call.exchange(reply), id, stores=stores)
                call.note(reply, at)
            except Exception:  # the call is recorded: only what later calls may say of it is lost
                logger.exception("%s: what a choice said cannot be looked into", session.id)
        for gap in call.gaps() if reason is None else ():
            recorder.record_gap(session, "model_call", gap)
        recorder.underway.settle(call.name)
        session.touch()
