"""Weight events for tests."""

from __future__ import annotations

from pathlib import Path

from millrace.infra.log.base import Bus, Outgoing
from millrace.schemas import codec
from millrace.schemas.ids import now_micros
from millrace.schemas.records import WeightVersion, WorkerStatus
from millrace.trainers.weights import manifest
from tests.support.tiny_model import write_manifest
from tests.support.versions import weights

NAMESPACE, POLICY = "reloader", "policy"
WEIGHTS, WORKERS = f"{NAMESPACE}.{POLICY}.weights", f"{NAMESPACE}.workers"


def weight_event(version: int, folder: Path) -> WeightVersion:
    """The event of a directory that holds a manifest."""
    listing = manifest.load(folder)
    return {
        **weights(version, listing.digest),
        "policy": POLICY,
        "parent": version - 1 if version else None,
        "uri": str(folder),
        "files": dict(listing.files),
        "time": now_micros(),
    }


def damaged(event: WeightVersion, folder: Path) -> WeightVersion:
    """An event whose hashes hold although `folder` was changed after it was made: what only an engine can find out."""
    listing = write_manifest(folder)
    return {**event, "digest": listing.digest, "files": dict(listing.files)}


def announce(bus: Bus, event: WeightVersion, topic: str = WEIGHTS) -> None:
    """Write a weight event."""
    publisher = bus.publisher()
    publisher.publish(Outgoing(topic, POLICY.encode(), codec.encode("WeightVersion", event))).result(30)
    publisher.close()


def statuses(bus: Bus, topic: str = WORKERS) -> list[WorkerStatus | None]:
    """Everything that was said of workers, in order; None is a withdrawal."""
    return [
        None if record.value is None else codec.decode_as("WorkerStatus", record.value) for record in bus.read(topic, 0)
    ]
