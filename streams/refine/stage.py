"""Refine: raw events in, governed events out. The only writer of `events` and the only stage with a clock.

Invariants:

- Every raw record ends as one event (its `source_place` says where it came from) or as one dead letter.
- Slot i writes partition i, in the order of the raw partition, with a log time that never falls and a chain of its own
  over the bytes that it stores.
- What must not be learned is withheld here, before anything downstream can read it: text redacted, token arrays of the
  call emptied, later calls of the same lineage withheld with it.
- One outcome is not repeatable: a detector that failed (`redaction` failed) may succeed when a turn is folded again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from infra.bus.base import Record
from infra.chain import START, event_hash
from infra.claims import ClaimStore
from infra.config import Governance
from infra.stage import TICK, Clear, Emit, Op, Put, Stage, View, Wake
from schemas import codec
from schemas.ids import Micros
from streams.refine import custody as chain
from streams.refine.detectors.base import Detector
from streams.refine.redact import Governed, blanked, govern, withheld
from streams.refine.tenancy import Tenancy, Verdict
from streams.refine.validate import Refusal, check_link, check_place, decode_body, decode_event
from streams.words import Decoder, dead_letter, place_of

EVENTS = "events"
CHAIN = "chain"
SECOND = 1_000_000
AFTER_END = 3600 * SECOND
"""log time for which an ended trajectory is remembered: a late reward through a gateway still finds its chain"""
IDLE = 24 * 3600 * SECOND
"""log time after which a silent trajectory is forgotten; what follows is flagged as a step gap"""


class Refine(Stage):
    """`slots` is N, the number of partitions of `raw`; `max_bytes` bounds an event, behind a claim or not."""

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
    ) -> None:
        self._tenancy = Tenancy(rules)
        self._detectors = detectors
        self._version = "+".join(detector.version() for detector in detectors) or "none"
        self._slots = slots
        self._decode = Decoder(claims, max_bytes)

    def on_record(self, view: View, record: Record, now: Micros) -> Iterable[Op]:
        try:
            event = decode_event(record, self._decode)
            check_place(record, event, self._slots)
            body = decode_body(event) if event["body_encoding"] == "plain" else None
            check_link(event)
            known = view.get(_key(event))
            if known is not None and known["group"] != event["group"]:
                raise Refusal("wrong_group", "the trajectory belongs to another group", event)
        except Refusal as refusal:
            yield dead_letter(
                self.name,
                place_of(record),
                refusal.code,
                str(refusal),
                now,
                key=record.key.decode("utf-8", "replace"),
                event=refusal.event,
                partition=view.slot,
            )
            return

        custody = known or chain.opened(event)
        chained = event["source_seq"] is not None
        if chained:
            custody = chain.followed(custody, event, now)
            if event["kind"] == "security_label" and body is not None:
                custody = {**custody, "labels": body}
        body_bytes, governance, custody = self._govern(event, body, custody)
        if chained:
            yield from self._keep(event, known, custody, now)
        yield from self._append(view, record, event, body_bytes, governance, now)

    def on_wake(self, view: View, key: str, now: Micros) -> Iterable[Op]:
        if key == TICK:
            progress = {"stage": self.name, "slot": view.slot, "time": now}
            yield Emit(EVENTS, f"progress/{view.slot}", "Progress", progress, partition=view.slot)
            return
        custody = view.get(key)
        if custody is not None:
            at = custody["seen"] + (AFTER_END if custody["ended"] else IDLE)
            yield Wake(key, at) if at > now else Clear(key)

    def _govern(
        self, event: Mapping[str, Any], body: dict[str, Any] | None, custody: chain.Custody
    ) -> tuple[bytes, dict[str, Any], chain.Custody]:
        """(bytes to store, governance, the trajectory's state after it)."""
        kind = event["kind"]
        verdict = self._tenancy.decide(event["tenant"], custody["split"], custody["labels"])
        if custody["flaw"] is not None and verdict.eligibility != "denied":
            verdict = verdict._replace(eligibility="audit_only", reason=custody["flaw"])
        if body is None:
            # Sealed before capture: nobody here can look inside, so nothing may be learned from it.
            return event["body"], self._record(verdict, Governed({}, "failed"), "sealed"), custody
        governed = govern(kind, body, self._detectors) if verdict.redact else Governed(body, "none_needed")
        flagged = self._flagged(kind, body, governed, custody)
        if verdict.eligibility == "denied":
            governed = Governed(blanked(kind, governed.body, "denied"), governed.redaction, governed.counts)
            flagged = flagged or "denied"
        stored = governed.body
        if kind == "model_call" and flagged:
            stored = withheld(stored, flagged)
            custody = chain.tainted(custody, body["lineage"])
        data = event["body"] if stored is body else codec.encode_body(kind, stored)
        return data, self._record(verdict, governed, flagged), custody

    def _flagged(self, kind: str, body: Mapping[str, Any], governed: Governed, custody: chain.Custody) -> str | None:
        """Why the content of this event must not be learned from; None for events no token comes from."""
        if governed.redaction == "failed":
            return "detectors_failed"
        if kind not in ("model_call", "episode_started", "episode_ended"):
            return None
        if governed.changed:
            return "redacted"
        return "withheld_context" if kind == "model_call" and body["lineage"] in custody["withheld"] else None

    def _record(self, verdict: Verdict, governed: Governed, flagged: str | None) -> dict[str, Any]:
        allowed = verdict.eligibility in ("tenant_only", "aggregate")
        return {
            "eligibility": "audit_only" if flagged and allowed else verdict.eligibility,
            "reason": flagged if flagged and allowed else verdict.reason,
            "classification": verdict.classification,
            "redaction": governed.redaction,
            "redaction_version": self._version,
            "policy_version": self._tenancy.version,
            "counts": governed.counts,
            "findings": governed.findings,
            "retention_until": None,
            "residency": verdict.residency,
        }

    def _keep(
        self, event: Mapping[str, Any], known: chain.Custody | None, custody: chain.Custody, now: Micros
    ) -> Iterable[Op]:
        key = _key(event)
        yield Put(key, custody)
        if custody["ended"] and not (known and known["ended"]):
            yield Wake(key, now + AFTER_END)
        elif known is None:
            yield Wake(key, now + IDLE)

    def _append(
        self,
        view: View,
        record: Record,
        event: Mapping[str, Any],
        body: bytes,
        governance: Mapping[str, Any],
        now: Micros,
    ) -> Iterable[Op]:
        prev: bytes = view.get(CHAIN) or START
        stored = {
            **event,
            "body": body,
            "log_time": now,
            "source_place": place_of(record),
            "source_hash": event["hash"],
            "prev_hash": prev,
            "governance": governance,
        }
        stored["hash"] = event_hash(prev, stored)
        yield Put(CHAIN, stored["hash"])
        yield Emit(
            EVENTS,
            f"{event['tenant']}/{event['group']}",
            "Event",
            stored,
            partition=view.slot,
            headers=headers_of(event, record),
        )


def _key(event: Mapping[str, Any]) -> str:
    return f"t/{event['tenant']}/{event['trajectory']}"


def headers_of(event: Mapping[str, Any], record: Record) -> dict[str, str]:
    """What travels beside an event, so that routing need not decode it; numbers and context as they came."""
    headers = {name: str(event[name]) for name in ("id", "kind", "policy", "group", "trajectory", "source")}
    for name in ("source", "source-seq", "source-epoch", "traceparent"):
        if name in record.headers:
            headers[name] = record.headers[name].decode("utf-8", "backslashreplace")
    return headers
