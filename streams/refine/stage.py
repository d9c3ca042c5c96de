"""Refine: raw events in, governed events out. The only writer of `events` and the only stage with a clock.

Invariants:

- Every raw record ends as one event (its `source_place` says where it came from) or as one dead letter.
- Slot i writes partition i, in the order of the raw partition, with a log time that never falls and a chain of its own
  over the bytes that it stores.
- What must not be learned is withheld here, before anything downstream can read it: text redacted, token arrays of the
  call emptied, later calls of the same lineage withheld with it. Names that hold a secret are replaced everywhere: in
  the envelope and the body, in key and headers, in this stage's state and in its dead letters.
- One outcome is not repeatable: a detector that failed (`redaction` failed) may succeed when a turn is folded again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import cast

from millrace.infra.config import Governance
from millrace.infra.log.base import Record
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.stages.base import TICK, Clear, Emit, Key, Op, Stage, Table, View, Wake
from millrace.schemas import codec, records
from millrace.schemas.chain import START, VERSION, event_hash
from millrace.schemas.ids import Micros
from millrace.schemas.records import Body, Event, EventKind, ModelCall, Progress, SecurityLabels
from millrace.streams.decoding import Decoder, dead_letter, place_of
from millrace.streams.refine import custody as chain
from millrace.streams.refine.detectors.base import Detector
from millrace.streams.refine.names import Replacements
from millrace.streams.refine.redact import EventParts, GovernedEvent, Redactor, UnreadNames, blank, withheld
from millrace.streams.refine.subjects.registry import Registry
from millrace.streams.refine.subjects.store import Registries
from millrace.streams.refine.tenancy import ContentUse, Tenancy
from millrace.streams.refine.validate import (
    Refusal,
    check_link,
    check_place,
    check_proof,
    check_replay,
    decode_body,
    decode_event,
)

EVENTS = "events"
CHAINS = Table[bytes]("chain")
CHAIN = CHAINS.key()
"""under it lies the last link of the slot's chain"""
TRAJECTORIES = Table[chain.Custody]("t/")
SECOND = 1_000_000
AFTER_END = 3600 * SECOND
"""log time for which an ended trajectory is remembered: a late reward through a gateway still finds its chain"""
IDLE = 24 * 3600 * SECOND
"""log time after which a silent trajectory is forgotten; what follows is flagged as a step gap"""


class Refine(Stage):
    """`slots` is N, the number of partitions of `raw`; `max_bytes` bounds an event, behind a claim or not;
    `reward_key` is what rewards must be signed with, where it is not empty."""

    name = "refine"
    primary = "raw"
    clock = True

    def __init__(
        self,
        rules: Governance,
        detectors: Sequence[Detector],
        *,
        slots: int,
        claims: ClaimStore | None = None,
        max_bytes: int = 32 << 20,
        owners: Mapping[str, str] | None = None,
        name_key: bytes = b"",
        reward_key: str = "",
        registries: Registries | None = None,
    ) -> None:
        self._tenancy = Tenancy(rules, owners)
        self._redactor = Redactor(detectors, Replacements(name_key, slots))
        self._registries = registries
        self._slots = slots
        self._reward_key = reward_key
        self._decode = Decoder(claims, max_bytes)

    def on_record(self, view: View, record: Record, now: Micros) -> Iterable[Op]:
        try:
            came = decode_event(record, self._decode)
            check_place(record, came, self._slots)
            body = decode_body(came) if came["body_encoding"] == "plain" else None
            check_link(came)
            check_proof(record, came, self._reward_key)
            check_replay(came, body)
            known = view.get(_key(came))
            fields = known.get("personal", ()) if known is not None else ()
            outcome = self._read(came, body, passed_on(record), fields)
            event = outcome.event
            former = view.get(_key(event))
            if former is not None and former["group"] != event["group"]:
                raise Refusal("wrong_group", "the trajectory belongs to another group", came)
        except Refusal as refusal:
            yield self._letter(view, record, refusal, now)
            return

        custody = former or chain.begin(event)
        is_chained = event["source_seq"] is not None
        if is_chained:
            custody = chain.follow(custody, event, now)
            if event["kind"] == "security_label" and outcome.body is not None:
                custody = {**custody, "labels": cast(SecurityLabels, outcome.body)}
            custody = chain.mark(custody, outcome.personal)
        body_bytes, governance, custody = self._govern(outcome, body, custody)
        if is_chained:
            yield from self._keep(event, former, custody, now)
        yield from self._append(view, record, outcome, body_bytes, governance, now)

    def _read(self, came: Event, body: Body | None, headers: Mapping[str, str], fields: Sequence[str]) -> GovernedEvent:
        """The event as detectors leave it. Raises Refusal for one that cannot even be kept without its text."""
        parts = EventParts(came, body, headers)
        redact, remove = self._tenancy.redacts(came["tenant"])
        if not redact:
            return GovernedEvent(came, body, headers, "none_needed")
        try:
            outcome = self._redactor.govern(parts, remove, self._registry(came["tenant"]), fields)
        except UnreadNames:
            raise Refusal("unread_names", "the detectors failed on the names of the event", came) from None
        if outcome.event["tenant"] != came["tenant"]:
            raise Refusal("secret_tenant", "the name of the tenant holds a secret", came)
        return outcome

    def _registry(self, tenant: str) -> Registry | None:
        return None if self._registries is None else self._registries.of(self._tenancy.rule_of(tenant))

    def _letter(self, view: View, record: Record, refusal: Refusal, now: Micros) -> Emit:
        """The dead letter of a refused record, without what its names hold."""
        ids = {} if refusal.event is None else _ids(refusal.event)
        key = record.key.decode("utf-8", "replace")
        if ids and key == f"{ids['tenant']}/{ids['group']}":
            registry = self._registry(ids["tenant"])
            clean = dict(zip(ids, self._redactor.names(ids["tenant"], list(ids.values()), registry), strict=True))
            key = f"{clean['tenant']}/{clean['group']}"
        else:
            tenant = ids.get("tenant", "")
            key, *rest = self._redactor.names(tenant, [key, *ids.values()], self._registry(tenant))
            clean = dict(zip(ids, rest, strict=True))
        return dead_letter(
            self.name,
            place_of(record),
            refusal.code,
            str(refusal),
            now,
            key=key,
            event=clean or None,
            partition=view.slot,
        )

    def on_wake(self, view: View, key: str, now: Micros) -> Iterable[Op]:
        if key == TICK:
            progress: Progress = {"stage": self.name, "slot": view.slot, "time": now}
            yield Emit(EVENTS, f"progress/{view.slot}", "Progress", progress, partition=view.slot)
            return
        trajectory = TRAJECTORIES.match(key)
        custody = view.get(trajectory) if trajectory else None
        if custody is not None:
            at = custody["seen"] + (AFTER_END if custody["ended"] else IDLE)
            yield Wake(key, at) if at > now else Clear(key)

    def ids_of(self, view: View, what: Record | str) -> Mapping[str, object]:
        return {} if isinstance(what, str) else _ids(decode_event(what, self._decode))

    def kept_name(self, source: str) -> str:
        return self._redactor.names("", [source])[0]

    def _govern(
        self, outcome: GovernedEvent, came: Body | None, custody: chain.Custody
    ) -> tuple[bytes, records.Governance, chain.Custody]:
        """(bytes to store, governance, the trajectory's state after it); `came` is the body before it was governed."""
        event, body = outcome.event, outcome.body
        kind = event["kind"]
        verdict = self._tenancy.decide(event["tenant"], event["policy"], custody["split"], custody["labels"])
        if custody["flaw"] is not None and verdict.eligibility != "denied":
            verdict = verdict._replace(eligibility="audit_only", reason=custody["flaw"])
        if body is None:
            # Sealed before capture: nobody here can look inside, so nothing may be learned from it.
            return event["body"], self._record(verdict, replace(outcome, redaction="failed"), "sealed"), custody
        reason = self._withhold_reason(kind, body, outcome, custody)
        if verdict.eligibility == "denied":
            body = blank(kind, body, "denied")
            outcome = replace(outcome, findings=[])
            reason = reason or "denied"
        if kind == "model_call" and reason:
            call = cast(ModelCall, body)
            custody = chain.taint(custody, event["id"], call, cast(ModelCall, came))
            body = withheld(call, reason)
        data = event["body"] if body is came else codec.encode_by_name(codec.BODIES[kind], body)
        return data, self._record(verdict, outcome, reason), custody

    def _withhold_reason(
        self, kind: EventKind, body: Body, outcome: GovernedEvent, custody: chain.Custody
    ) -> str | None:
        """Why the content of this event must not be learned from; None for events no token comes from."""
        if outcome.failure is not None:
            return outcome.failure
        if kind not in ("model_call", "episode_started", "episode_ended"):
            return None
        if outcome.edits_text:
            return "redacted"
        if kind == "model_call" and chain.holds_withheld(custody, cast(ModelCall, body)):
            return "withheld_context"
        return None

    def _record(self, verdict: ContentUse, outcome: GovernedEvent, reason: str | None) -> records.Governance:
        may_train = verdict.eligibility in ("tenant_only", "aggregate")
        return {
            "eligibility": "audit_only" if reason and may_train else verdict.eligibility,
            "reason": reason if reason and may_train else verdict.reason,
            "classification": verdict.classification,
            "redaction": outcome.redaction,
            "redaction_version": "+".join(filter(None, (self._redactor.version, outcome.registry))),
            "policy_version": self._tenancy.version,
            "counts": outcome.counts,
            "findings": outcome.findings,
            "retention_until": None,
            "residency": verdict.residency,
        }

    def _keep(self, event: Event, former: chain.Custody | None, custody: chain.Custody, now: Micros) -> Iterable[Op]:
        key = _key(event)
        yield TRAJECTORIES.put(key, custody)
        if custody["ended"] and not (former and former["ended"]):
            yield Wake(key, now + AFTER_END)
        elif former is None:
            yield Wake(key, now + IDLE)

    def _append(
        self,
        view: View,
        record: Record,
        outcome: GovernedEvent,
        body: bytes,
        governance: records.Governance,
        now: Micros,
    ) -> Iterable[Op]:
        event = outcome.event
        prev = view.get(CHAIN) or START
        stored_event: Event = {
            **event,
            "body": body,
            "log_time": now,
            "source_place": place_of(record),
            "source_hash": event["hash"],
            "prev_hash": prev,
            "hash_version": VERSION,
            "governance": governance,
        }
        stored_event["hash"] = event_hash(prev, stored_event)
        yield CHAINS.put(CHAIN, stored_event["hash"])
        yield Emit(
            EVENTS,
            f"{event['tenant']}/{event['group']}",
            "Event",
            stored_event,
            partition=view.slot,
            headers=headers_of(outcome),
        )


def _key(event: Event) -> Key[chain.Custody]:
    return TRAJECTORIES.key(f"{event['tenant']}/{event['trajectory']}")


def _ids(event: Event) -> dict[str, str]:
    """What a dead letter says of an event."""
    return {
        "id": event["id"],
        "policy": event["policy"],
        "tenant": event["tenant"],
        "group": event["group"],
        "trajectory": event["trajectory"],
    }


def passed_on(record: Record) -> dict[str, str]:
    """The headers of a raw record that travel with its event: numbers and context as they came."""
    names = ("source", "source-seq", "source-epoch", "traceparent")
    return {name: record.headers[name].decode("utf-8", "backslashreplace") for name in names if name in record.headers}


def headers_of(outcome: GovernedEvent) -> dict[str, str]:
    """What travels beside an event, so that routing need not decode it."""
    event = outcome.event
    return {
        "id": event["id"],
        "kind": event["kind"],
        "policy": event["policy"],
        "group": event["group"],
        "trajectory": event["trajectory"],
        "source": event["source"],
        **outcome.headers,
    }
