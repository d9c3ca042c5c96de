"""The private parts of torch, DeepSpeed, Megatron and transformers that training needs, each behind a name that says
what it does. A new release of one of them is checked here.

Invariant: no other module of trainers imports or touches a private name of another package.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore as HashStore
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch.distributed.distributed_c10d import Store, _set_pg_timeout, _world
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from transformers import PretrainedConfig

from millrace.trainers.phase_clock import COLLECTIVES, Clock

# ---- torch: process groups


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


# ---- torch: FSDP2


class _TimedCollective:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A plain buffer for the collective."""
        return torch.empty(*size, dtype=dtype, device=device)


class TimedAllGather(_TimedCollective, AllGather):
    """Gathers a layer's shards before it is used."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        with self._clock.phase(COLLECTIVES):
            work: dist.Work | None = dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


class TimedReduceScatter(_TimedCollective, ReduceScatter):
    """Sums a layer's gradients over the ranks and leaves each its shard."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        with self._clock.phase(COLLECTIVES):
            work: dist.Work | None = dist.reduce_scatter_single(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
        return work


# ---- transformers


def has_class(auto: Any, config: PretrainedConfig) -> bool:
    """Whether an auto class of transformers, such as AutoModelForCausalLM, has a model for this configuration."""
    return type(config) in auto._model_mapping


def attention_of(config: PretrainedConfig) -> str:
    """The name of the attention that models of this configuration use."""
    return str(config._attn_implementation)


def set_attention(config: PretrainedConfig, name: str) -> None:
    """Makes the modules that hold this configuration attend by the attention of this name."""
    config._attn_implementation = name


# ---- DeepSpeed


def lend_world(deepspeed: Any) -> None:
    """Hands DeepSpeed the world's group. It would clone the group, with sockets that nobody could close."""
    deepspeed.utils.groups._WORLD_GROUP = dist.group.WORLD


def release_groups(deepspeed: Any) -> None:
    """Makes DeepSpeed forget the groups that it knows."""
    deepspeed.utils.groups._release_process_group_references()


def disable_shared_memory(deepspeed: Any) -> None:
    """Turns off an operator for inference, which DeepSpeed compiles at the first group of each machine."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def forget_engines() -> None:
    """Empties what ZeRO-3 keeps of models that are gone. It pushes each model it meets on a list and pops none; and it
    counts modules and parameters over the life of a process, numbers that must agree over ranks which have lived
    through different groups."""
    zero = "deepspeed.runtime.zero"
    offload = importlib.import_module(f"{zero}.parameter_offload")
    offload.FWD_MODULE_STACK.clear()
    offload.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
    importlib.import_module(f"{zero}.partition_parameters").Init.param_id = 0


def fp32_address(parameter: Any) -> Any:
    """Where ZeRO 1 and 2 keep the fp32 values of a parameter; None where another rank does."""
    return parameter._hp_mapping


# ---- Megatron


def shard_range(optimizer: Any, parameter: torch.nn.Parameter) -> Any:
    """The range of a parameter that this rank's distributed optimizer keeps."""
    return optimizer._get_model_param_range_map(parameter)["param"]


def forget_partial_group(parallel_state: Any) -> None:
    """Drops the one group that Megatron keeps when it destroys its others."""
    parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None
