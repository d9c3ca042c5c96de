"""Megatron's process groups: they come with a formed group of ranks and go with it.

Ranks are laid out tensor first, then context, then data, then pipeline, as Megatron does; data and expert dimensions
follow from the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup

from millrace.trainers.backends.layout import Layout
from millrace.trainers.backends.megatron.config import expert_tensor
from millrace.trainers.backends.megatron.weights import Coordinates
from millrace.trainers.private_apis.megatron import forget_partial_group

EXTRA = (
    "megatron-core is not installed: run `make setup`, elsewhere `pip install -e '.[backends]'`, or use a torch: layout"
)


@dataclass(frozen=True, slots=True)
class MegatronGroups:
    """This rank's place in Megatron's groups, after `open_groups`."""

    layout: Layout
    data_rank: int
    place: Coordinates
    part: int
    first: bool
    last: bool
    cells: ProcessGroup
    """ranks with this place in every cell"""
    dense: ProcessGroup
    """ranks that hold copies of the same dense parameters, data and context together"""
    expert: ProcessGroup
    """the same of expert parameters"""
    pipeline: ProcessGroup
    context: ProcessGroup | None
    tensor_rank: int

    @property
    def counts(self) -> bool:
        """Whether this rank speaks for its cell: what it says of losses is counted, copies are not."""
        return self.last and self.tensor_rank == 0 and self.part == 0


def open_groups(layout: Layout, timeout: float) -> MegatronGroups:
    """Makes the groups. All ranks of the world call it together, torch's default group being there."""
    from megatron.core import parallel_state as state
    from megatron.core import tensor_parallel

    state.initialize_model_parallel(
        tensor_model_parallel_size=layout.t,
        pipeline_model_parallel_size=layout.p,
        context_parallel_size=layout.c,
        expert_model_parallel_size=layout.e,
        expert_tensor_parallel_size=expert_tensor(layout),
        distributed_timeout_minutes=timeout / 60,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    return MegatronGroups(
        layout=layout,
        data_rank=state.get_data_parallel_rank(),
        place=Coordinates(
            t=state.get_tensor_model_parallel_rank(),
            p=state.get_pipeline_model_parallel_rank(),
            e=state.get_expert_model_parallel_rank(),
            expert_t=state.get_expert_tensor_parallel_rank(),
        ),
        part=state.get_context_parallel_rank(),
        first=state.is_pipeline_first_stage(),
        last=state.is_pipeline_last_stage(),
        cells=state.get_data_parallel_group(),
        dense=state.get_data_parallel_group(with_context_parallel=True),
        expert=state.get_expert_data_parallel_group(),
        pipeline=state.get_pipeline_model_parallel_group(),
        context=state.get_context_parallel_group() if layout.c > 1 else None,
        tensor_rank=state.get_tensor_model_parallel_rank(),
    )


def close_groups() -> None:
    """Forgets them, if there are any. torch's own groups go with its default group."""
    from megatron.core import parallel_state as state

    if state.model_parallel_is_initialized():
        state.destroy_model_parallel()
        forget_partial_group(state)
