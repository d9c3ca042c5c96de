"""What each tracker wrote, read back from its files; and a process that is killed while it tracks."""

from __future__ import annotations

import os
import signal
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

Points = list[tuple[int, dict[str, float]]]


def jsonl(directory: Path) -> Points:
    from millrace.trainers.tracking.jsonl import points

    return [(int(point.pop("step")), point) for point in points(directory)]


def tensorboard(directory: Path) -> Points:
    from millrace.trainers.tracking.services import points

    return list(points(directory))


def mlflow(directory: Path) -> Points:
    """From the files of the one run: <experiment>/<run>/metrics/<name>, a line a point."""
    found: dict[int, list[tuple[str, float]]] = defaultdict(list)
    for path in directory.glob("*/*/metrics/*"):
        for line in path.read_text().splitlines():
            _, value, step = line.split()[:3]
            if path.name != "millrace.step":
                found[int(step)].append((path.name, float(value)))
    assert all(len(dict(pairs)) == len(pairs) for pairs in found.values()), "a point is doubled"
    return sorted((step, dict(pairs)) for step, pairs in found.items())


def wandb(directory: Path) -> Points:
    """From the offline runs, whose files are LevelDB logs of protobuf records behind a header of 7 bytes."""
    import json

    from wandb.proto.wandb_internal_pb2 import Record

    points: Points = []
    for path in sorted(directory.glob("life-*/wandb/offline-run-*/run-*.wandb")):
        for content in _records(path.read_bytes()):
            record: Any = Record.FromString(content)
            if record.HasField("history"):
                values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                step = record.history.step.num
                points.append((step, {name: v for name, v in values.items() if not name.startswith("_")}))
    return points


BLOCK = 32768


def _records(data: bytes) -> list[bytes]:
    """Whole records of a LevelDB log: pieces of (checksum, length, kind) and content, in blocks."""
    at, made, out = 7, b"", []
    while at + 7 <= len(data):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        content = data[at + 7 : at + 7 + length]
        if kind == 0 or len(content) < length:
            break
        made = content if kind in (1, 2) else made + content
        if kind in (1, 4):
            out.append(made)
        at += 7 + length
    return out


READERS = {"jsonl": jsonl, "tensorboard": tensorboard, "mlflow": mlflow, "wandb": wandb}


def main(name: str, directory: str) -> None:
    """Log steps 1 to 3, then die."""
    from millrace.trainers.tracking.services import open_trackers

    (tracker,) = open_trackers([name], Path(directory), "run")
    for step in (1, 2, 3):
        tracker.log(step, {"loss": 1 / step})
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
