"""DeepSpeed: its groups, its operators, and what it keeps of models that are gone."""

from __future__ import annotations

import importlib
from typing import Any

import torch.distributed as dist


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
