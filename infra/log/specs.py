"""Whether topics are what they must be: one judgement for every sibling of the bus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millrace.infra.errors import TopicError
from millrace.infra.log.base import TopicSpec

CLEANUP, RETENTION, SEGMENT = "cleanup.policy", "retention.ms", "segment.ms"
HOUR_MS = 3_600_000


def compare(specs: Sequence[TopicSpec], state: Mapping[str, TopicSpec]) -> None:
    """Raises TopicError naming every topic of `specs` that is missing from `state`, or that has there another number of
    partitions, another cleanup policy or retention, or that forgets in other parts. `state` holds whole configurations,
    by topic."""
    wrong = [line for spec in specs for line in [_wrong(spec, state.get(spec.name))] if line]
    if wrong:
        raise TopicError(
            "; ".join(wrong) + ". Missing ones are created by `millrace topics`; others keep what they were made with: "
            "change [topics], or the topic (kafka-configs --alter), or use another namespace."
        )


def _wrong(spec: TopicSpec, state: TopicSpec | None) -> str:
    if state is None:
        return f"{spec.name} is missing"
    if state.partitions != spec.partitions:
        return f"{spec.name} has {state.partitions} partitions, not {spec.partitions}"
    cleanup = spec.config.get(CLEANUP, "delete")
    if (there := state.config.get(CLEANUP, "delete")) != cleanup:
        return f"{spec.name} has cleanup.policy {there}, not {cleanup}"
    retention = spec.config.get(RETENTION)
    if retention is not None and (there := state.config.get(RETENTION, retention)) != retention:
        return f"{spec.name} keeps records {_hours(there)}, not {_hours(retention)}"
    parts = spec.config.get(SEGMENT) if cleanup == "delete" else None
    if parts is not None and (there := state.config.get(SEGMENT, parts)) != parts:
        return f"{spec.name} forgets in parts of {_hours(there)}, not {_hours(parts)}"
    return ""


def alterations(specs: Sequence[TopicSpec], state: Mapping[str, TopicSpec]) -> dict[str, dict[str, str]]:
    """Settings by topic that differ and that can be changed without losing a record that was to be kept: in what parts
    a topic forgets. What else differs is `compare`'s."""
    return {
        spec.name: {SEGMENT: spec.config[SEGMENT]}
        for spec in specs
        if spec.config.get(CLEANUP, "delete") == "delete" and SEGMENT in spec.config
        if spec.name in state and state[spec.name].config.get(SEGMENT) != spec.config[SEGMENT]
    }


def _hours(milliseconds: str) -> str:
    return "for ever" if milliseconds == "-1" else f"{int(milliseconds) / HOUR_MS:g} h"
