"""The name of an evaluation: what it says, so that nobody can change a word of it unseen.

Invariant: `id` is the sha256 over the record's stored bytes with `id` empty, computed with the writer's own schema, so
that a record of an older release keeps its name."""

from __future__ import annotations

import hashlib
import io
from typing import Any, cast

from fastavro import schemaless_reader, schemaless_writer

from millrace.schemas import codec
from millrace.schemas.records import Evaluation
from millrace.schemas.registry import by_fingerprint


def named(evaluation: Evaluation) -> Evaluation:
    """The evaluation with the id that belongs to it; its own `id` is ignored."""
    unnamed: Evaluation = {**evaluation, "id": ""}
    return {**unnamed, "id": hashlib.sha256(codec.encode("Evaluation", unnamed)).hexdigest()}


def stored_id(value: bytes) -> str:
    """The id that belongs to the evaluation stored as `value`, hex. Raises SchemaError when it is none."""
    codec.decode_as("Evaluation", value)
    writer = by_fingerprint(value[2 : codec.HEAD])
    record = cast(dict[str, Any], schemaless_reader(io.BytesIO(value[codec.HEAD :]), writer.parsed, None))
    out = io.BytesIO()
    out.write(value[: codec.HEAD])
    schemaless_writer(out, writer.parsed, {**record, "id": ""})
    return hashlib.sha256(out.getvalue()).hexdigest()
