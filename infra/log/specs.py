"""Whether topics are what they must be: one judgement for every sibling of the bus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millrace.infra.errors import TopicError
from millrace.infra.log.base import TopicSpec

CLEANUP, RETENTION, SEGMENT = "cleanup.policy", "retention.ms", "segment.ms"
HOUR_MS = 3_600_000


def compare(specs: Sequence[TopicSpec], found: Mapping[str, TopicSpec]) -> None:
    """Raises TopicError naming every topic of `specs` that is missing from `found`, or that has there another number of
    partitions, another cleanup policy or retention, or that forgets in other parts. `found` holds whole configurations,
    by topic."""
    wrong = [said for spec in specs for said in [_wrong(spec, found.get(spec.name))] if said]
    if wrong:
        raise TopicError(
            "; ".join(wrong) + ". Missing ones are created by `millrace topics`; others keep what they were made with: "
            "change [topics], or the topic (kafka-configs --alter), or use another namespace."
        )


def _wrong(wanted: TopicSpec, found: TopicSpec | None) -> str:
    if found is None:
        return f"{wanted.name} is missing"
    if found.partitions != wanted.partitions:
        return f"{wanted.name} has {found.partitions} partitions, not {wanted.partitions}"
    cleanup = wanted.config.get(CLEANUP, "delete")
    if (there := found.config.get(CLEANUP, "delete")) != cleanup:
        return f"{wanted.name} has cleanup.policy {there}, not {cleanup}"
    kept = wanted.config.get(RETENTION)
    if kept is not None and (there := found.config.get(RETENTION, kept)) != kept:
        return f"{wanted.name} keeps records {_hours(there)}, not {_hours(kept)}"
    parts = wanted.config.get(SEGMENT) if cleanup == "delete" else None
    if parts is not None and (there := found.config.get(SEGMENT, parts)) != parts:
        return f"{wanted.name} forgets in parts of {_hours(there)}, not {_hours(parts)}"
    return ""


def alterations(specs: Sequence[TopicSpec], found: Mapping[str, TopicSpec]) -> dict[str, dict[str, str]]:
    """Settings by topic that differ and that can be changed without losing a record that was to be kept: in what parts
    a topic forgets. What else differs is `compare`'s."""
    return {
        spec.name: {SEGMENT: spec.config[SEGMENT]}
        for spec in specs
        if spec.config.get(CLEANUP, "delete") == "delete" and SEGMENT in spec.config
        if spec.name in found and found[spec.name].config.get(SEGMENT) != spec.config[SEGMENT]
    }


def _hours(milliseconds: str) -> str:
    return "for ever" if milliseconds == "-1" else f"{int(milliseconds) / HOUR_MS:g} h"
