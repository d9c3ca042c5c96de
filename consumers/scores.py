"""What an evaluation came to, in the history of its policy, under a name that is a digest of its content.

Invariants: the `id` is the sha256 over the record's stored bytes with `id` empty, computed with the writer's own
schema, so that nobody can change a word of it unseen and a record of an older release keeps its name; what is published
is durable when `publish` returns; a mean counts tasks, not answers, and an answer that could not be judged counts
nowhere."""

from __future__ import annotations

import hashlib
import io
import math
import statistics
from collections.abc import Sequence
from typing import Any, cast

from fastavro import schemaless_reader, schemaless_writer

from millrace.infra.config import Settings
from millrace.infra.log.base import Bus, Outgoing, Place
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.topics import full_name
from millrace.schemas import codec
from millrace.schemas.records import Evaluation, TaskScore
from millrace.schemas.registry import by_fingerprint


def with_id(evaluation: Evaluation) -> Evaluation:
    """The evaluation with the id that belongs to it; its own `id` is ignored."""
    content: Evaluation = {**evaluation, "id": ""}
    return {**content, "id": hashlib.sha256(codec.encode("Evaluation", content)).hexdigest()}


def stored_id(value: bytes) -> str:
    """The id that belongs to the evaluation stored as `value`, hex. Raises SchemaError when it is none."""
    codec.decode_as("Evaluation", value)
    writer = by_fingerprint(value[2 : codec.HEAD])
    record = cast(dict[str, Any], schemaless_reader(io.BytesIO(value[codec.HEAD :]), writer.avro, None))
    out = io.BytesIO()
    out.write(value[: codec.HEAD])
    schemaless_writer(out, writer.avro, {**record, "id": ""})
    return hashlib.sha256(out.getvalue()).hexdigest()


def means(tasks: Sequence[TaskScore]) -> list[float]:
    """The mean reward of the judged answers to each task that has any."""
    verdicts = [[reward for reward in task["rewards"] if reward is not None] for task in tasks]
    return [math.fsum(rewards) / len(rewards) for rewards in verdicts if rewards]


def mean_of(tasks: Sequence[TaskScore]) -> tuple[float | None, float | None]:
    """(mean over tasks, its standard error); None where no task, or fewer than two, was judged."""
    column = means(tasks)
    if not column:
        return None, None
    error = statistics.stdev(column) / math.sqrt(len(column)) if len(column) > 1 else None
    return statistics.fmean(column), error


def publish(settings: Settings, bus: Bus, evaluation: Evaluation) -> Place:
    """Write an evaluation to `<policy>.scores`, named by its content; gives its place.

    Raises TopicError where that topic is missing, UnreachableError when the log does not answer."""
    topic = full_name(settings.namespace, f"{evaluation['policy']}.scores")
    bus.partitions(topic)  # Kafka would create a missing one, with settings of its own
    data = ClaimStore(settings.claims).fitting("Evaluation", codec.encode("Evaluation", with_id(evaluation)))
    key = "" if evaluation["version"] is None else str(evaluation["version"])
    with bus.publisher() as publisher:
        delivery = publisher.publish(Outgoing(topic, key.encode(), data))
        publisher.flush()
        return delivery.result()
