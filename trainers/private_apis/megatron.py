"""Megatron: the shards of its optimizer, and a group that it keeps."""

from __future__ import annotations

from typing import Any

import torch


def shard_range(optimizer: Any, parameter: torch.nn.Parameter) -> Any:
    """The range of a parameter that this rank's distributed optimizer keeps."""
    return optimizer._get_model_param_range_map(parameter)["param"]


def forget_partial_group(parallel_state: Any) -> None:
    """Drops the one group that Megatron keeps when it destroys its others."""
    parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None
