"""Who sent a request, by the key that it bears: a session's own key, a configured one, or none.

Invariants: keys are looked up by their digests, so that how long a look-up takes tells nothing about a key; what looks
like a session's own key is that or refused, also where the gateway asks for no keys; a session's own key never grants
anything."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from millrace.dialects.errors import ApiError
from millrace.producers.gateway.options import GatewayOptions
from millrace.producers.gateway.sessions.session import GatewaySession
from millrace.producers.gateway.sessions.sessions import KEY_PREFIX, Sessions


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request: a tenant, the session whose own key was used, if any, whether it may take grants and speak
    for every verifier, and else for which; `key` is the name of the static key that bears what it spends."""

    tenant: str
    session: GatewaySession | None
    takes_grants: bool = False
    judges: frozenset[str] = frozenset()
    key: str = ""

    def barred_sources(self, verifiers: frozenset[str]) -> frozenset[str]:
        """Those of the reserved sources that it may not speak for."""
        return frozenset() if self.takes_grants else verifiers - self.judges

    def speaks_in(self, session: GatewaySession) -> bool:
        """Whether it may add to a session of its tenant and end it: where a grant asked for one, whoever takes grants
        and the session's own key alone."""
        return self.takes_grants or self.session is session or not session.has_grant

    def check_speaks_in(self, session: GatewaySession) -> None:
        """Raises ApiError 403 for a caller that may not."""
        if not self.speaks_in(session):
            message = "A grant asked for this session: only its own key and the rollout workers' speak in it and end it"
            raise ApiError(403, message, code="not_granted")


class Callers:
    """Whoever may send requests to a gateway: the holders of its static keys and those of its `sessions`' keys."""

    def __init__(self, options: GatewayOptions, sessions: Sessions) -> None:
        self.options = options
        self.sessions = sessions
        self._tenants = {digest(key): tenant for key, tenant in options.keys.items()}
        self._names = {digest(key): name for key, name in options.key_names.items()}
        self._judges = {digest(key): sources for key, sources in options.judges.items()}

    def identify(self, headers: Mapping[str, str]) -> Caller:
        """The caller behind a request's headers. Raises ApiError 401."""
        key = key_of(headers)
        if key.startswith(KEY_PREFIX):
            return self._by_session_key(key)
        key_digest, workers = digest(key), self.options.rollout_key
        tenant = self._tenants.get(key_digest) if self._tenants else self.options.tenant
        if tenant is None:
            raise ApiError(
                401, "Incorrect API key provided: use a session's own key or a configured one", code="invalid_api_key"
            )
        takes_grants = bool(workers) and key_digest == digest(workers)
        judges = self._judges.get(key_digest, frozenset())
        return Caller(tenant, None, takes_grants, judges, self._names.get(key_digest, ""))

    def _by_session_key(self, key: str) -> Caller:
        """A session's own key is that or nothing: it never passes for a caller without one."""
        id = self.sessions.id_of(key)
        if id is None:
            raise ApiError(
                401,
                "This session key is not one of this gateway's: gateways that share sessions' keys need the same "
                "[gateway] session_secret",
                code="invalid_api_key",
            )
        session = self.sessions.get(id)
        if session is None:
            raise ApiError(
                401,
                "This session is not known here: it has expired, or another gateway holds it. Start a new session, and "
                "use the base_url that comes with its key",
                code="session_expired",
            )
        return Caller(session.tenant, session, key=session.payer)


def key_of(headers: Mapping[str, str]) -> str:
    """The key that a request bears, as one of the headers that clients use has it; "" where it bears none."""
    scheme, _, word = headers.get("authorization", "").strip().partition(" ")
    key = word.strip() if scheme.lower() == "bearer" else scheme
    return key or headers.get("x-api-key") or headers.get("api-key", "")


def digest(key: str) -> bytes:
    """What a key is looked up by. It takes any string, also the surrogates that Python reads bytes of the environment
    as where they are no text."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()
