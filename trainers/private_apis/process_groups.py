"""Groups of torch's processes: their stores, their waits, and what torch keeps of those that ended."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore as HashStore
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch.distributed.distributed_c10d import Store, _set_pg_timeout, _world


def limit_waits(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Lets no collective of a group that has formed, or of the world, wait longer than `timeout`."""
    _set_pg_timeout(timeout, group)


def reset_group_count() -> None:
    """Makes torch name the next group as the first of its process. torch names a group by how many this process has
    made, and counts anew only when a group ends: after one that never formed, this process would look for its peers
    under another name than theirs."""
    _world.group_count = 0


def forget_meshes() -> None:
    """Empties DTensor's caches. Call it after a group ended, before the next one forms.

    The caches hold the meshes, and so the groups with their threads, of whoever filled them. Meshes of equal shape are
    equal to each other, so tensors of the next group would come out bound to the dead one."""
    if "torch.distributed.tensor.debug" not in sys.modules and "torch.distributed.fsdp" not in sys.modules:
        return
    # Loaded here: whoever only sends or receives weights has no meshes, and does without what loads for a second.
    from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    _gen_transform_infos.cache_clear()


def gloo_group(
    rank: int, world: int, store: Store, operations: Store, forming: timedelta, timeout: timedelta
) -> dist.ProcessGroup:
    """A gloo group beside the world's: it forms within `forming`, its collectives wait for `timeout` at most."""
    gloo = dist.ProcessGroupGloo(store, rank, world, forming)
    gloo._set_default_timeout(timeout)
    group = dist.ProcessGroup(operations, rank, world)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


def gloo_at(host: str, rank: int, world: int, store: Store, timeout: timedelta) -> Any:
    """A gloo group whose sockets listen on `host` and no other address."""
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs know little of it
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=host)]
    return gloo(store, rank, world, options)
