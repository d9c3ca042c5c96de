"""Which session a call belongs to: what its caller says of it first, then what it names, then what it echoes.

    its own key -> the name of its conversation -> responses that it names -> what it echoes (`sessions/ownership.py`)

Invariants: a call belongs to one session, which calls that come meanwhile find too; nobody speaks in another caller's
session, nor learns whether there is one; a call that fits none begins an episode, as far as its tenant may."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millrace.dialects.errors import ApiError, not_held_error
from millrace.dialects.rendering.base import Message
from millrace.dialects.stored_responses import Recall, StoredResponse
from millrace.producers.gateway.http.callers import Caller
from millrace.producers.gateway.options import GatewayOptions
from millrace.producers.gateway.sessions.ownership import Hints, SessionMatch, hints
from millrace.producers.gateway.sessions.responses import ResponseRecall, named_owner, nameless_owner, owner_of
from millrace.producers.gateway.sessions.session import GatewaySession
from millrace.producers.gateway.sessions.sessions import Sessions
from millrace.schemas.json_values import Json


class SessionMatching:
    """That of the calls of one gateway."""

    def __init__(self, options: GatewayOptions, sessions: Sessions) -> None:
        self._options = options
        self._sessions = sessions

    def session_for_call(
        self,
        caller: Caller,
        hints: Hints,
        messages: Sequence[Message],
        digests: Sequence[bytes],
        used: Sequence[StoredResponse] = (),
        policy: str | None = None,
    ) -> SessionMatch:
        """Find or open the session of a call, and register it at once, so that concurrent calls find the same one. One
        that belongs to none gets an unsolicited session of this policy, which begins with its first record. `used`: the
        responses that the call named. Raises ApiError 403 and 429."""
        session, proven, by = caller.session, True, "key"
        if session is None and hints.name:
            session, by = self._session_of_name(caller, hints), hints.named_by
        elif (
            session is None
            and len(sessions := {stored_response.session for stored_response in used}) == 1
            and sessions & self._sessions.live.keys()
        ):
            session, by = self._sessions.live[sessions.pop()], "response_id"
        elif session is None and (
            match := self._sessions.replies.owners.find(caller.tenant, hints.subject, messages, digests)
        ):
            session, proven, by = match
        if session is None:
            by = hints.named_by if hints.name else "first"
            terms = self._options.terms(policy)
            session = self._sessions.make_session(caller.tenant, hints, terms.awaits, terms.reward_deadline_ms, policy)
        if session.has_ended:
            raise ended_refusal(session)
        session.touch()
        if session.id not in self._sessions.live:
            if hints.must_exist:
                raise not_held_error()
            self.admit(caller.tenant)
            self._sessions.add(session)
        self._sessions.replies.stored.touch(used)
        return SessionMatch(session, proven, by)

    def _session_of_name(self, caller: Caller, hints: Hints) -> GatewaySession | None:
        """The caller's live session that goes by the id or the name that a call gives. The id of another tenant's is a
        name like any other: nobody learns from it whether there is such a session."""
        session = self._sessions.live.get(hints.name or "")
        if session is None or session.tenant != caller.tenant:
            session = self._sessions.find_by_name(caller.tenant, hints)
        if session is not None:
            caller.check_speaks_in(session)
        return session

    def recall(self, caller: Caller, headers: Mapping[str, str], users: Sequence[Json] = ()) -> Recall:
        """The stored responses that a call may name, which says this of its end user. Raises ApiError 403."""
        names, session = hints(headers, *users), caller.session
        if session is None and names.name:
            session = self._session_of_name(caller, names)
        if session is not None:
            owner = owner_of(session)
        elif names.name:
            owner = named_owner(caller.tenant, names.subject, names.name)
        else:
            owner = nameless_owner(caller.tenant, names.subject)
        return ResponseRecall(self._sessions.replies.stored, owner, self._options.max_body_bytes)

    def admit(self, tenant: str) -> None:
        """Raises ApiError 429 for a tenant that has as many live episodes as it may."""
        if self._sessions.count[tenant] >= self._options.max_sessions:
            raise ApiError(
                429,
                f"This tenant has {self._options.max_sessions} live episodes: end some, or try again later",
                type="rate_limit_error",
                code="too_many_sessions",
                retry_after_s=1,
            )


def ended_refusal(session: GatewaySession) -> ApiError:
    """The refusal of a call in a session that has ended."""
    return ApiError(403, f"Session {session.id} has ended: start a new one", code="session_ended")
