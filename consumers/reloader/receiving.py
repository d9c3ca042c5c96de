"""What a process of an engine does with a broadcast: join its group, receive, check. Loading is the engine's affair.
`millrace.infra.engines.kind.RECEIVER` names `receive`.

Messages are plain objects, as engines' routes take them: `group` has `host`, `port`, `ranks` and `timeout_s`,
`announced` the base64 of the weight file's first bytes (`header`) and the sha256 hex of the whole file (`digest`).

Invariant: what is returned is the file that was announced, bit for bit."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch

from millrace.infra import faults
from millrace.trainers.weights import broadcast


def receive(group: Mapping[str, Any], announced: Mapping[str, Any], rank: int = 1) -> dict[str, torch.Tensor]:
    """The tensors, on the CPU. Raises CorruptCheckpoint or RuntimeError when they do not come."""
    return broadcast.receive(
        str(group["host"]),
        int(group["port"]),
        rank,
        int(group["ranks"]),
        base64.b64decode(announced["header"]),
        str(announced["digest"]),
        float(group["timeout_s"]),
        fault=_fault,
    )


def _fault(name: str) -> None:
    """The points of `millrace.trainers.weights.broadcast`, which knows no `infra`, under names that the list finds."""
    match name:
        case "joining":
            faults.point("receiver.joining")
        case "between_pieces":
            faults.point("receiver.between_pieces")
        case "after_last":
            faults.point("receiver.after_last")
