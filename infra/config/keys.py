"""What the gateway's static keys must be, and which tenant the rollout workers are.

Invariants: one key is one caller, so that no traffic is taken for another's; beyond this machine no key is short or
printed in these pages; the workers are a tenant of their own unless their key names one."""

from __future__ import annotations

from collections.abc import Mapping

WORKERS = "rollouts"
"""the tenant of the workers' key: of the one that `[rollout] key` names, when that names none, and of one made here"""
SESSION_KEY = "mr-"
"""how the keys of sessions begin"""
SHORTEST = 16
"""characters of a key or secret that is used beyond this machine"""
EXAMPLE_KEYS = frozenset({"a long random word", "another long random word"})


def faults(keys: Mapping[str, str], secret: str, *, local: bool, pepper: str = "") -> str | None:
    """What is wrong with these keys, by name, with the secret of the session keys or with the pepper; None when all is
    well."""
    names: dict[str, str] = {}
    for name, key in keys.items():
        if key in names:
            return (
                f"[gateway.keys] {names[key]} and {name} are the same key, which would take one's traffic for the "
                "other's: give each its own, `openssl rand -hex 24` makes one"
            )
        names[key] = name
        if key.startswith(SESSION_KEY):
            return f"[gateway.keys.{name}] key begins with {SESSION_KEY}, as only keys of sessions do: choose another"
        if not local and (len(key) < SHORTEST or key in EXAMPLE_KEYS):
            return (
                f"[gateway.keys.{name}] key can be guessed (under {SHORTEST} characters, or printed in Millrace's "
                "pages), and the gateway is reachable from other machines: `openssl rand -hex 24` makes a good one"
            )
    if secret and len(secret) < 2 * SHORTEST:
        return f"[gateway] session_secret has under {2 * SHORTEST} characters: `openssl rand -hex 24` makes a good one"
    if pepper and len(pepper) < 2 * SHORTEST:
        return f"[gateway] pepper has under {2 * SHORTEST} characters: `openssl rand -hex 24` makes a good one"
    return None


def with_workers(data: Mapping[str, object]) -> dict[str, object]:
    """The raw settings with the workers' tenant filled in, and rules for it: those of `local` where it has none. Beside
    keys, workers whose key nobody named are that tenant too."""
    name = _table(data.get("rollout")).get("key")
    gateway = _table(data.get("gateway"))
    keys = _table(gateway.get("keys"))
    key = _table(keys.get(name)) if isinstance(name, str) else {}
    if not keys or (name and (not key or "tenant" in key)):
        return dict(data)
    governance = _table(data.get("governance"))
    tenants = _table(governance.get("tenants", {"local": {}}))
    tenants.setdefault(WORKERS, tenants.get("local", {}))
    return {
        **data,
        "gateway": {**gateway, "keys": {**keys, name: {**key, "tenant": WORKERS}}} if key else gateway,
        "governance": {**governance, "tenants": tenants},
    }


def _table(value: object) -> dict[object, object]:
    return dict(value) if isinstance(value, Mapping) else {}
