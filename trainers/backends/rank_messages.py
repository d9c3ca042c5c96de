"""Messages between the ranks of a group, beside tensors: JSON that is decoded as one type.

Invariants: no collective here pickles, so nothing that a peer sends is run; a message that is no value of the type is
refused. Messages travel over the CPU, as every group that ranks form can (`group.py`)."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from millrace.trainers.errors import TrainerError

T = TypeVar("T")


def exchange(value: T, kind: Any, group: dist.ProcessGroup | None = None) -> list[T]:
    """Give every rank the values of all ranks of the group, by rank; all ranks call it. `kind`: the type of the values,
    such as a dataclass or a list of them. Raises TrainerError for a message that does not decode as `kind`."""
    world, message = dist.get_world_size(group), msgspec.json.encode(value)
    length = torch.tensor([len(message)])
    lengths = [torch.zeros_like(length) for _ in range(world)]
    dist.all_gather(lengths, length, group=group)
    sizes = [int(one) for one in lengths]
    buffer = torch.zeros(max(sizes), dtype=torch.uint8)
    buffer[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    texts = [torch.empty_like(buffer) for _ in range(world)]
    dist.all_gather(texts, buffer, group=group)
    return [_read(text[:size], kind, rank) for rank, (text, size) in enumerate(zip(texts, sizes, strict=True))]


def _read(text: torch.Tensor, kind: Any, rank: int) -> Any:
    try:
        return msgspec.json.decode(text.numpy().tobytes(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TrainerError(f"the message of rank {rank} of the group cannot be read: {error}") from None
