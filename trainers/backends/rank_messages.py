"""What the ranks of a group tell each other beside tensors: JSON that is read as one type, so that nothing that a peer
sends is run.

Invariants: no collective here pickles; what is no value of the type is refused. It goes by the CPU, as every group that
ranks form can (`group.py`)."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from millrace.trainers.errors import TrainerError

T = TypeVar("T")


def exchange(value: T, kind: Any, group: dist.ProcessGroup | None = None) -> list[T]:
    """The value of every rank of the group, by rank; all of them call it. `kind`: the type of the values, such as a
    dataclass or a list of them. Raises TrainerError for a value that is none."""
    world, mine = dist.get_world_size(group), msgspec.json.encode(value)
    length = torch.tensor([len(mine)])
    lengths = [torch.zeros_like(length) for _ in range(world)]
    dist.all_gather(lengths, length, group=group)
    sizes = [int(one) for one in lengths]
    sent = torch.zeros(max(sizes), dtype=torch.uint8)
    sent[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    texts = [torch.empty_like(sent) for _ in range(world)]
    dist.all_gather(texts, sent, group=group)
    return [_read(text[:size], kind, rank) for rank, (text, size) in enumerate(zip(texts, sizes, strict=True))]


def _read(text: torch.Tensor, kind: Any, rank: int) -> Any:
    try:
        return msgspec.json.decode(text.numpy().tobytes(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TrainerError(f"what rank {rank} of the group says cannot be read: {error}") from None
