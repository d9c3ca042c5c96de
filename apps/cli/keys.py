"""Commands about the keys of clients: `key create`, `list`, `rotate`, `revoke`.

Invariants: each writes one record and is done, or nothing; a key is shown once, after the log has it, and stands
nowhere; what is refused leaves no record."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated

import typer

from millrace.apps.cli.context import call, console
from millrace.infra.config import Settings
from millrace.infra.connect import connect_now
from millrace.infra.errors import ConfigError, LookError
from millrace.infra.local_keys import make_pepper, pepper_of
from millrace.infra.log.base import Bus
from millrace.infra.log.topics import full_name
from millrace.infra.principals.book import (
    ALL_TENANTS,
    LIVE_KEYS,
    ROLES,
    PrincipalBook,
    act_record,
    mac_of,
    new_key,
    outgoing,
    pepper_name,
)
from millrace.infra.principals.watch import TOPIC, read_book, user_name
from millrace.infra.terminal import put, put_json
from millrace.schemas.ids import now_micros
from millrace.schemas.records import Principal

key = typer.Typer(
    no_args_is_help=True,
    help="Keys of clients, kept in the log: who may call, judge, work and read, until when, and for how much.",
)
UNITS = {"m": 60, "h": 3600, "d": 86_400}
SENDING = frozenset({"agent", "worker", "annotator"})
"""roles that send traffic, which is a tenant's"""
PATIENCE_S = 30
Json = Annotated[bool, typer.Option("--json", help="for programs")]
Expires = Annotated[str, typer.Option(help="after which it is no more: 90d, 12h, 30m, or a date; empty: never")]


@key.command("create")
def create(
    context: typer.Context,
    client: Annotated[str, typer.Option(help="whose key: a program, a service or a person")],
    role: Annotated[
        list[str],
        typer.Option(
            help="what it may do; may be repeated. agent: calls, sessions and rewards; worker: takes grants and judges "
            "as any source; annotator: rewards of its --reward-source alone; reader, auditor, operator: SQL, health; "
            "approver: nothing yet; owner: calls, rewards, SQL"
        ),
    ],
    tenant: Annotated[
        str, typer.Option(help="whose traffic it sends, as in [governance.tenants]; * for none")
    ] = "local",
    expires: Expires = "",
    not_before: Annotated[str, typer.Option(help="from when it is valid: 1h, or a date; empty: now")] = "",
    reward_source: Annotated[list[str] | None, typer.Option(help="reserved source that it judges as")] = None,
    scope: Annotated[list[str] | None, typer.Option(help="name for policies of a later release")] = None,
    max_in_flight: Annotated[int | None, typer.Option(min=1, help="most requests at once")] = None,
    max_rate: Annotated[float | None, typer.Option(min=1e-9, help="most requests a second")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="tokens of calls in a minute")] = None,
    budget: Annotated[float | None, typer.Option(min=1e-9, help="money in --budget-hours")] = None,
    budget_hours: Annotated[float, typer.Option(min=1e-3, help="at most [topics] short_hours")] = 24,
    as_json: Json = False,
) -> None:
    """Make a client's first key, and show it, once. From the first key on, the gateway takes no caller without one.

    Example: millrace key create --client support-bot --tenant support --role agent --expires 90d
    """
    settings = call(context).settings()
    roles, now = sorted(set(role)), now_micros()
    if unknown := set(roles) - set(ROLES):
        raise ConfigError(f"there is no role {', '.join(sorted(unknown))}: choose from {', '.join(ROLES)}")
    if not re.fullmatch(r"[\w.@+-]{1,128}", client):
        raise ConfigError("--client takes 1 to 128 letters, digits and . @ + - _")
    if tenant == ALL_TENANTS and SENDING.intersection(roles):
        raise ConfigError(f"the roles {', '.join(sorted(SENDING))} send traffic of one tenant: name it with --tenant")
    if budget_hours > settings.topics.short_hours:
        raise ConfigError(f"--budget-hours is at most [topics] short_hours, {settings.topics.short_hours}")
    terms: Principal = {
        **act_record("grant", "", now, ""),
        "client": client,
        "tenant": tenant,
        "roles": roles,
        "scopes": scope or [],
        "reward_sources": reward_source or [],
        "not_before": moment_of(not_before, now) if not_before else None,
        "expires": moment_of(expires, now) if expires else None,
        "max_in_flight": max_in_flight,
        "max_rate": max_rate,
        "tokens_per_minute": tokens_per_minute,
        "budget": budget,
        "budget_hours": budget_hours,
    }
    with connect_now(settings) as bus:
        book = _book(bus, settings)
        if live_keys := book.live(client, now):
            raise LookError(
                f"{client} has the key {live_keys[-1]['id']}: `millrace key rotate {client}` makes the next"
            )
        _grant(bus, settings, book, terms, as_json=as_json)


@key.command("rotate")
def rotate(
    context: typer.Context,
    client: Annotated[str, typer.Argument(metavar="NAME", help="the client")],
    expires: Expires = "",
    as_json: Json = False,
) -> None:
    """Make a client's next key, with the terms of the one before, which stays live until it is revoked.

    Without --expires it is valid for as long as the one before was. Example: millrace key rotate support-bot
    """
    settings, now = call(context).settings(), now_micros()
    with connect_now(settings) as bus:
        book = _book(bus, settings)
        live_keys = book.live(client, now)
        if not live_keys:
            raise LookError(f"{client} has no live key: `millrace key create --client {client}` makes one")
        if len(live_keys) == LIVE_KEYS:
            older, newer = (one["id"] for one in live_keys)
            raise LookError(
                f"{client} has two live keys, {older} and {newer}: once nobody uses the older any more (`millrace key "
                f"list` says when it was used last), run `millrace key revoke {older}`"
            )
        former = live_keys[-1]
        life = (
            None
            if former["expires"] is None
            else now + former["expires"] - max(former["time"], former["not_before"] or 0)
        )
        end = moment_of(expires, now) if expires else life
        _grant(
            bus,
            settings,
            book,
            {**former, "expires": end, "not_before": None, "replaces": former["id"]},
            as_json=as_json,
        )


@key.command("revoke")
def revoke(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="KEYID|NAME", help="a key, or the client whose keys all end")],
    reason: Annotated[str, typer.Option(help="why, for the record")] = "",
    as_json: Json = False,
) -> None:
    """End a key, or all keys of a client, for good. Gateways and the warehouse refuse them within two seconds.

    Example: millrace key revoke support-bot --reason "left in a log"
    """
    settings, now = call(context).settings(), now_micros()
    with connect_now(settings) as bus:
        book = _book(bus, settings)
        named = [one["id"] for one in book.grants if name in (one["id"], one["client"])]
        if not named:
            raise LookError(f"there is no key and no client {name}: `millrace key list` names them")
        # A revocation again would hide when the first was.
        ids = [id for id in named if book.revocation(id) is None]
        _write(bus, settings, [act_record("revoke", id, now, user_name(), reason or None) for id in ids])
    if as_json:
        put_json({"revoked": ids})
    else:
        put(f"revoked: {', '.join(ids)}" if ids else f"every key of {name} was revoked before")


@key.command("list")
def list_keys(
    context: typer.Context,
    every: Annotated[bool, typer.Option("--all", help="those that are revoked or over too")] = False,
    as_json: Json = False,
) -> None:
    """Show the keys of the log and those of [gateway.keys], whose they are, and when they were used last."""
    settings, now = call(context).settings(), now_micros()
    with connect_now(settings) as bus:
        book = read_book(bus, settings.namespace)
    grants = [one for one in book.grants if every or book.standing(one["id"], now) not in ("revoked", "expired")]
    rows = [_row(book, grant, now) for grant in grants]
    rows += [
        {"id": "", "client": name, "tenant": entry.tenant, "roles": (), "standing": "live", "source": "settings"}
        for name, entry in settings.gateway.keys.items()
    ]
    if as_json:
        put_json(rows)
        return
    for row in rows:
        words = [f"{word} {row[word]}" for word in ("expires", "last_used") if row.get(word)]
        roles = ",".join(map(str, row["roles"])) if isinstance(row["roles"], list) else ""
        put(
            "  ".join(
                [
                    f"{row['id'] or '[gateway.keys]':16}",
                    *(str(row[name]) for name in ("client", "tenant")),
                    roles,
                    str(row["standing"]),
                    *words,
                ]
            )
        )
    if foreign := book.foreign_ids(pepper_of(settings), now):
        console.print(f"{len(foreign)} of them were made with another pepper than this machine has", highlight=False)


def moment_of(text: str, now: int) -> int:
    """The moment that a span (90d) from now, or a date of UTC, names, in micros. Raises ConfigError."""
    if match := re.fullmatch(r"(\d{1,6})([mhd])", text):
        return now + int(match[1]) * UNITS[match[2]] * 1_000_000
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{text!r} is no span (90d, 12h, 30m) and no date (2027-01-31)") from None
    return int((date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() * 1_000_000)


def _book(bus: Bus, settings: Settings) -> PrincipalBook:
    """What the log says; its topic is there from now on."""
    name = full_name(settings.namespace, TOPIC)
    bus.ensure_topics([spec for spec in settings.layout.specs() if spec.name == name])
    return read_book(bus, settings.namespace)


def _grant(bus: Bus, settings: Settings, book: PrincipalBook, terms: Principal, *, as_json: bool) -> None:
    """Make a key on these terms. Raises ConfigError where this machine lacks the pepper of the others."""
    now = now_micros()
    if foreign := book.foreign_ids(pepper_of(settings), now):
        raise ConfigError(
            f"{len(foreign)} keys, {foreign[0]} among them, were made with another pepper than this machine has: copy "
            "keys/pepper under home from where they were made, or set [gateway] pepper; if it is lost, revoke them"
        )
    if terms["expires"] is not None and terms["expires"] <= now:
        raise ConfigError("--expires is over already")
    pepper = make_pepper(settings)
    id, word = new_key()
    record: Principal = {
        **terms,
        "id": id,
        "time": now,
        "author": user_name(),
        "mac": mac_of(pepper, word),
        "pepper": pepper_name(pepper),
    }
    _write(bus, settings, [record])
    if as_json:
        put_json(
            {"id": id, "key": word, "client": record["client"], "tenant": record["tenant"], "roles": record["roles"]}
        )
        return
    put(f"{word}\n\nThis is the key of {record['client']}, and it is shown this once. It is valid at once.")
    if not book.has_keys and not settings.gateway.keys:
        put("It is the first: gateways now refuse whoever brings no key.")
    if record["replaces"]:
        put(f"Once its clients use it: millrace key revoke {record['replaces']}")


def _write(bus: Bus, settings: Settings, records: list[Principal]) -> None:
    """Have the log take the records."""
    with bus.publisher() as publisher:
        for record in records:
            publisher.publish(outgoing(full_name(settings.namespace, TOPIC), record)).result(PATIENCE_S)


def _row(book: PrincipalBook, grant: Principal, now: int) -> dict[str, object]:
    revocation = book.revocation(grant["id"])
    left_out = ("mac", "pepper", "act", "time", "reason", "not_before", "expires")
    return {
        **{name: value for name, value in grant.items() if name not in left_out},
        "standing": book.standing(grant["id"], now),
        "made": _date(grant["time"]),
        "not_before": _date(grant["not_before"]),
        "expires": _date(grant["expires"]),
        "last_used": _date(book.last_use(grant["id"])),
        "revoked": None if revocation is None else _date(revocation["time"]),
        "revoked_by": None if revocation is None else revocation["author"],
        "reason": None if revocation is None else revocation["reason"],
        "source": "log",
    }


def _date(micros: int | None) -> str | None:
    return None if micros is None else datetime.fromtimestamp(micros / 1e6, UTC).isoformat(timespec="seconds")
