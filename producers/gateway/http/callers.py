"""Who sent a request, by the key that it bears: a session's own key, a configured one, one of the log, or none.

Invariants: configured keys are looked up by their digests, so that how long a look-up takes tells nothing about a key;
what looks like a session's own key is that or refused, also where the gateway asks for no keys; a session's own key
never grants anything, and is refused once no key of the client that began it is live; what the log cannot tell is
refused, never taken for a gateway that asks for no keys."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from millrace.dialects.errors import ApiError
from millrace.infra.config import Settings
from millrace.infra.log.base import Bus
from millrace.infra.principals.book import ADVICE, ALL_TENANTS, KEY, PrincipalBook
from millrace.infra.principals.watch import PrincipalWatch
from millrace.producers.gateway.options import GatewayOptions
from millrace.producers.gateway.sessions.session import GatewaySession
from millrace.producers.gateway.sessions.sessions import KEY_PREFIX, Sessions
from millrace.producers.gateway.spending import KeyLimits, Spending
from millrace.schemas.ids import now_micros
from millrace.schemas.records import Principal

Act = Literal["call", "reward", "read"]
"""what a route lets its caller do: ask models and keep sessions, judge, or look at names and health"""
ROLE_ACTS: Mapping[str, frozenset[Act]] = {
    "owner": frozenset({"call", "reward"}),
    "agent": frozenset({"call", "reward"}),
    "worker": frozenset({"call", "reward"}),
    "annotator": frozenset({"reward"}),
}
"""what a role may do besides looking"""
PAYER = "principal:"
"""before the name of a client of the log, as what bears what it spends"""
START_S = 10.0
"""longest that a start waits for the keys of the log"""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request: a tenant, the session whose own key was used, if any, whether it may take grants and speak
    for every verifier, and else for which; `key` is the name of the static key, or of the client, that bears what it
    spends, `limits` what a client of the log may take; `may` is what its roles let it do besides looking, `sources` the
    reward sources that it speaks for, None: any; `runs`: it is told what all tenants do."""

    tenant: str
    session: GatewaySession | None
    takes_grants: bool = False
    judges: frozenset[str] = frozenset()
    key: str = ""
    limits: KeyLimits | None = None
    may: frozenset[Act] = frozenset({"call", "reward"})
    sources: frozenset[str] | None = None
    runs: bool = False

    def check_may(self, act: Act) -> None:
        """Raises ApiError 403 for a caller whose roles do not allow it."""
        if act != "read" and act not in self.may:
            able = ", ".join(role for role, acts in ROLE_ACTS.items() if act in acts)
            message = (
                f"The roles of this key do not let it {act}: make one with the role {able} and a tenant of its own"
            )
            raise ApiError(403, message, code="role_missing")

    def check_judges(self, source: str) -> None:
        """Raises ApiError 403 for a source that an annotator's key does not name."""
        if self.sources is not None and source not in self.sources:
            names = ", ".join(sorted(self.sources)) or "none"
            message = f"This key speaks for the reward sources {names} alone, not for {source!r}"
            raise ApiError(403, message, code="wrong_source", param="source")

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
    """Whoever may send requests to a gateway: the holders of its static keys, those of its `sessions`' keys, and those
    of the log, as far as it follows `principals`."""

    def __init__(self, options: GatewayOptions, sessions: Sessions, principals: PrincipalWatch | None = None) -> None:
        self.options = options
        self.sessions = sessions
        self.principals = principals
        self._tenants = {digest(key): tenant for key, tenant in options.keys.items()}
        self._names = {digest(key): name for key, name in options.key_names.items()}
        self._judges = {digest(key): sources for key, sources in options.judges.items()}

    def identify(self, headers: Mapping[str, str]) -> Caller:
        """The caller behind a request's headers. Raises ApiError 401, and 503 where the log would have to tell and does
        not."""
        key = key_of(headers)
        if key.startswith(KEY_PREFIX):
            return self._by_session_key(key)
        key_digest, workers = digest(key), self.options.rollout_key
        tenant = self._tenants.get(key_digest)
        if tenant is None and KEY.fullmatch(key):
            return self._by_principal(key)
        if not self._tenants:
            watch = self.principals
            if watch is None or not watch.asks_for_keys or (workers and key_digest == digest(workers)):
                tenant = self.options.tenant
            elif not watch.ready.is_set():
                raise _unread()
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
        limits = self._limits_of_payer(session.payer) if session.payer.startswith(PAYER) else None
        return Caller(session.tenant, session, key=session.payer, limits=limits)

    def _limits_of_payer(self, payer: str) -> KeyLimits:
        """What the client may take that began a session. Raises ApiError 401 once none of its keys is live."""
        watch = self._trusted()
        live_keys = watch.book.live(payer.removeprefix(PAYER), now_micros())
        if not live_keys:
            raise ApiError(
                401, "The keys of the client that began this session are revoked or over", code="key_revoked"
            )
        return _limits(live_keys[-1])

    def _by_principal(self, key: str) -> Caller:
        """Raises ApiError 401 for a key that is not live, 503 where that cannot be known."""
        if self.principals is None:
            raise ApiError(401, ADVICE["unknown"], code="invalid_api_key")
        verdict = self._trusted().verify(key)
        if verdict.standing == "foreign":
            raise ApiError(503, ADVICE["foreign"], type="server_error", code="keys_unread", retry_after_s=5)
        if verdict.standing != "live" or verdict.grant is None:
            code = "invalid_api_key" if verdict.standing == "unknown" else f"key_{verdict.standing}"
            raise ApiError(401, ADVICE[verdict.standing], code=code)
        grant = verdict.grant
        roles = set(grant["roles"])
        acts: frozenset[Act] = frozenset().union(*(ROLE_ACTS.get(role, frozenset()) for role in roles))
        sources = frozenset(grant["reward_sources"])
        newest = self._trusted().book.live(grant["client"], now_micros())[-1:] or [grant]
        return Caller(
            grant["tenant"],
            None,
            takes_grants="worker" in roles,
            judges=sources,
            key=PAYER + grant["client"],
            limits=_limits(newest[0]),
            may=frozenset() if grant["tenant"] == ALL_TENANTS else acts,
            sources=None if "call" in acts else sources,
            runs=not roles.isdisjoint({"owner", "operator"}),
        )

    def _trusted(self) -> PrincipalWatch:
        """The watch. Raises ApiError 503 where the log has not answered for too long, or not yet."""
        if self.principals is None or not self.principals.is_trusted:
            raise _unread()
        return self.principals


def open_principals(bus: Bus, settings: Settings, name: str) -> PrincipalWatch:
    """Follow the keys of the log as the gateway process of this name. Waits until they are known, or the log has not
    told them for `START_S`: its keys are refused then until it does."""
    watch = PrincipalWatch(bus, settings, name)
    watch.start()
    watch.ready.wait(START_S)
    return watch


def spending_of(options: GatewayOptions, watch: PrincipalWatch, loop: asyncio.AbstractEventLoop) -> Spending:
    """Of the static keys, and of the clients of the log, whatever it comes to say of them; it is used in `loop`."""
    spending = Spending({**options.limits, **client_limits(watch.book)})

    def change(book: PrincipalBook) -> None:
        with suppress(RuntimeError):  # the loop was closed: nobody spends any more
            loop.call_soon_threadsafe(spending.adopt, client_limits(book))

    watch.on_change = change
    return spending


def client_limits(book: PrincipalBook) -> dict[str, KeyLimits]:
    """What each client may take: as its newest live key says, or the newest where none is live."""
    now = now_micros()
    grants = sorted(book.grants, key=lambda grant: book.standing(grant["id"], now) == "live")  # stable: by age then
    return {PAYER + grant["client"]: _limits(grant) for grant in grants}


def tenants_of(options: GatewayOptions, principals: PrincipalWatch | None) -> set[str]:
    """Whoever may send traffic with a key."""
    grants: Iterable[Principal] = () if principals is None else principals.book.grants
    return {*options.keys.values(), *(grant["tenant"] for grant in grants)}


def _limits(grant: Principal) -> KeyLimits:
    return KeyLimits(
        grant["max_in_flight"],
        grant["max_rate"],
        grant["tokens_per_minute"],
        grant["budget"],
        grant["budget_hours"],
    )


def _unread() -> ApiError:
    return ApiError(
        503,
        "The log does not tell who may use this gateway: its brokers do not answer; try again",
        type="server_error",
        code="keys_unread",
        retry_after_s=1,
    )


def key_of(headers: Mapping[str, str]) -> str:
    """The key that a request bears, as one of the headers that clients use has it; "" where it bears none."""
    scheme, _, word = headers.get("authorization", "").strip().partition(" ")
    key = word.strip() if scheme.lower() == "bearer" else scheme
    return key or headers.get("x-api-key") or headers.get("api-key", "")


def digest(key: str) -> bytes:
    """What a key is looked up by. It takes any string, also the surrogates that Python reads bytes of the environment
    as where they are no text."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()
