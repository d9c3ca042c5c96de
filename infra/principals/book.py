"""Who a key is, and whether it may be used: a fold over the records of `principals`. Pure.

Invariants: the fold depends on nothing but the newest record of each compaction key (a key's id with an act), so what
a compacted topic gives is what the whole one gives; grant, revocation and use have compaction keys of their own, so
none overwrites another and a revocation is final, in whatever order they were written; of a client at most two keys
are live, the oldest ones, so that a third that is made in haste cuts nobody off; whether a key is revoked or over
is told only to who holds it. One thread folds, others may ask meanwhile."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
from typing import Literal, NamedTuple

from millrace.infra.log.base import Outgoing
from millrace.schemas import codec
from millrace.schemas.records import Principal, PrincipalAct

ROLES = ("owner", "operator", "approver", "auditor", "annotator", "agent", "worker", "reader")
ALL_TENANTS = "*"
LIVE_KEYS = 2
"""most live keys of a client"""
KEY = re.compile(r"(mk_[a-z0-9]{12})_[0-9a-f]{64}")
"""a key: its id, and a secret of 256 bits"""

KeyStanding = Literal["live", "early", "expired", "revoked", "surplus", "foreign", "unknown"]
ADVICE: dict[KeyStanding, str] = {
    "early": "this key is not valid yet",
    "expired": "this key has expired: `millrace key rotate` makes the next",
    "revoked": "this key was revoked",
    "surplus": f"its client has {LIVE_KEYS} older keys that are live: revoke one of them",
    "foreign": "the keys of clients cannot be checked here: the pepper of this machine is not the one that they were "
    "made with; copy keys/pepper under home from where `millrace key` runs, or set [gateway] pepper",
    "unknown": "Incorrect API key provided: no such key was made",
    "live": "this key is live",
}
"""what is said of a key that cannot be used"""


class KeyVerdict(NamedTuple):
    """How a key stands. grant: whose it is, where it is known to be that key."""

    standing: KeyStanding
    grant: Principal | None = None


def new_key() -> tuple[str, str]:
    """The id of a key, and the key."""
    id = "mk_" + "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(12))
    return id, f"{id}_{secrets.token_hex(32)}"


def mac_of(pepper: str, key: str) -> str:
    """HMAC-SHA256, in hexadecimal: what is stored of a key."""
    return hmac.new(pepper.encode(), key.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()


def pepper_name(pepper: str) -> str:
    """What tells peppers apart and says nothing of them; empty of none."""
    return mac_of(pepper, "the pepper of millrace")[:16] if pepper else ""


def act_record(act: PrincipalAct, id: str, time: int, author: str, reason: str | None = None) -> Principal:
    """A record that says so of a key, and nothing of whose it is. time: micros."""
    return {
        "id": id,
        "act": act,
        "time": time,
        "author": author,
        "client": "",
        "tenant": "",
        "roles": [],
        "scopes": [],
        "reward_sources": [],
        "mac": "",
        "pepper": "",
        "not_before": None,
        "expires": None,
        "replaces": None,
        "max_in_flight": None,
        "max_rate": None,
        "tokens_per_minute": None,
        "budget": None,
        "budget_hours": 24.0,
        "reason": reason,
    }


def outgoing(topic: str, record: Principal) -> Outgoing:
    """The record as it is written, under the compaction key of what it says."""
    key = f"{record['id']}/{record['act']}".encode()
    return Outgoing(topic, key, codec.encode("Principal", record), partition=0)


class PrincipalBook:
    """Every key that was ever made."""

    def __init__(self) -> None:
        self._newest: dict[PrincipalAct, dict[str, Principal]] = {"grant": {}, "revoke": {}, "use": {}}
        self._ids: dict[str, frozenset[str]] = {}
        """ids by client"""

    def fold(self, record: Principal) -> None:
        """The next record of the log."""
        grants, id = self._newest["grant"], record["id"]
        if record["act"] == "grant":
            former = grants.get(id)
            if former is not None and former["client"] != record["client"]:
                self._ids[former["client"]] -= {id}
            self._ids[record["client"]] = self._ids.get(record["client"], frozenset()) | {id}
        self._newest[record["act"]][id] = record

    @property
    def grants(self) -> list[Principal]:
        """Of all keys, the oldest first."""
        return sorted(self._newest["grant"].copy().values(), key=_age)

    @property
    def has_keys(self) -> bool:
        """Whether any was ever made."""
        return bool(self._newest["grant"])

    def revocation(self, id: str) -> Principal | None:
        """The record that revoked a key."""
        return self._newest["revoke"].get(id)

    def last_use(self, id: str) -> int | None:
        """When a key was used last, in micros, up to an hour too early; None: never."""
        use = self._newest["use"].get(id)
        return None if use is None else use["time"]

    def live(self, client: str, now: int) -> list[Principal]:
        """The keys of a client that are live at a time in micros, or will be, the oldest first."""
        grants = self._newest["grant"]
        ids = (id for id in self._ids.get(client, ()) if self._end(grants[id], now) is None)
        return sorted((grants[id] for id in ids), key=_age)[:LIVE_KEYS]

    def standing(self, id: str, now: int) -> KeyStanding:
        """How a key stands at a time in micros, whoever holds it."""
        grant = self._newest["grant"].get(id)
        if grant is None:
            return "unknown"
        if (end := self._end(grant, now)) is not None:
            return end
        if grant not in self.live(grant["client"], now):
            return "surplus"
        return "early" if grant["not_before"] is not None and now < grant["not_before"] else "live"

    def verify(self, key: str, pepper: str, now: int) -> KeyVerdict:
        """Whose key this is, at a time in micros."""
        match = KEY.fullmatch(key)
        grant = self._newest["grant"].get(match[1]) if match else None
        if grant is None:
            return KeyVerdict("unknown")
        if grant["pepper"] != pepper_name(pepper):
            return KeyVerdict("foreign")
        if not hmac.compare_digest(mac_of(pepper, key), grant["mac"]):
            return KeyVerdict("unknown")
        return KeyVerdict(self.standing(grant["id"], now), grant)

    def foreign_ids(self, pepper: str, now: int) -> list[str]:
        """Ids of the keys that are not over and that this pepper cannot check."""
        name = pepper_name(pepper)
        return [one["id"] for one in self.grants if one["pepper"] != name and self._end(one, now) is None]

    def _end(self, grant: Principal, now: int) -> Literal["revoked", "expired"] | None:
        if grant["id"] in self._newest["revoke"]:
            return "revoked"
        return "expired" if grant["expires"] is not None and now >= grant["expires"] else None


def _age(grant: Principal) -> tuple[int, str]:
    return grant["time"], grant["id"]
