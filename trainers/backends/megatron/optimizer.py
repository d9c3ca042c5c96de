"""Megatron's distributed optimizer, built without a collective: AdamW over this rank's shard of each parameter.

Dense and expert parameters have an optimizer each, since different ranks hold copies of them. A shard is a range of a
parameter's elements; moments travel as whole parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from torch.distributed import ProcessGroup

from millrace.trainers.backends.base import Adam
from millrace.trainers.backends.megatron.groups import MegatronGroups
from millrace.trainers.backends.megatron.weights import Piece, fill
from millrace.trainers.private_apis.megatron import shard_range
from millrace.trainers.weights.state import State


class Optimizer:
    """Of one wrapped model."""

    def __init__(self, ddp: DistributedDataParallel, adam: Adam, groups: MegatronGroups) -> None:
        self._wrapped, self._adam = ddp, adam
        dense = [p for p in ddp.parameters() if getattr(p, "allreduce", True)]
        expert = [p for p in ddp.parameters() if not getattr(p, "allreduce", True)]
        self._parts = [self._part(dense, ddp.buffers, groups.dense, expert=False)]
        if expert:
            self._parts.append(self._part(expert, ddp.expert_parallel_buffers, groups.expert, expert=True))
        self._group_of = {id(p): groups.dense for p in dense} | {id(p): groups.expert for p in expert}
        self._shards: dict[int, tuple[torch.Tensor, int, int, torch.optim.Optimizer]] = {}
        for part in self._parts:
            for models, mains in zip(part.model_fp32_groups, part.shard_fp32_groups, strict=True):
                for model, main in zip(models, mains, strict=True):
                    extent = shard_range(part, model)
                    self._shards[id(model)] = (main, extent.start, extent.end, part.optimizer)

    def _part(
        self, parameters: Sequence[torch.nn.Parameter], buffers: Sequence[object], group: ProcessGroup, *, expert: bool
    ) -> DistributedOptimizer:
        adam = self._adam
        settings = {
            "params": list(parameters),
            "wd_mult": 1.0,
            "lr_mult": 1.0,
            "is_expert_parallel": expert,
            "is_decoupled_lr": False,
        }
        with torch.no_grad():
            optimizer = DistributedOptimizer(
                torch.optim.AdamW(
                    [settings], betas=adam.betas, eps=adam.eps, weight_decay=adam.weight_decay, foreach=False
                ),
                OptimizerConfig(
                    optimizer="adam",
                    lr=0.0,
                    params_dtype=torch.float32,
                    use_distributed_optimizer=True,
                    clip_grad=adam.clip,
                ),
                None,
                lambda *_: None,
                model_chunks=[self._wrapped],
                per_model_buffers={0: list(buffers)},
                data_parallel_group=group,
                data_parallel_group_gloo=None,
                data_parallel_group_idx=0,
                distributed_optimizer_instance_id=0,
            )
        optimizer.tp_group = parallel_state.get_tensor_model_parallel_group()
        return optimizer

    # ---- a step

    def zero(self) -> None:
        """Before the micro-batches of a step."""
        self._wrapped.zero_grad_buffer()
        for part in self._parts:
            part.zero_grad()

    def squared_norm(self) -> float:
        """This rank's part of the squared gradient norm, in float64: over all ranks every element counts once."""
        total = 0.0
        for part in self._parts:
            part.prepare_grads()
            for gradient in part.get_main_grads_for_grad_norm():
                total += float(torch.linalg.vector_norm(gradient).double() ** 2)
        return total

    def apply(self, norm: float, lr: float) -> None:
        """Clips by the whole model's norm, updates the shards and gathers the parameters."""
        scale = min(1.0, self._adam.clip / (norm + 1e-6))
        for part in self._parts:
            for main in part.get_parameters():
                if main.grad is not None:
                    main.grad.mul_(scale)
            for settings in part.param_groups:
                settings["lr"] = lr
        for part in self._parts:
            # Megatron's own step would gather all of the model's parameters once an optimizer.
            MixedPrecisionOptimizer.step_with_ready_grads(part)
        self._wrapped.start_param_sync()

    # ---- moments

    def load(self, pieces: Mapping[str, list[Piece]], state: State) -> None:
        """Takes this rank's shards of the moments of `state`. No collective."""
        for name, parameter in self._wrapped.module.named_parameters():
            if id(parameter) not in self._shards:
                continue
            main, lo, hi, optimizer = self._shards[id(parameter)]
            extent: dict[str, torch.Tensor] = {"step": torch.tensor(float(state.step))}
            for slot, tensors in state.moments.items():
                local = torch.zeros_like(parameter.data)
                fill(local, pieces[name], tensors)
                extent[slot] = local.reshape(-1)[lo:hi].clone()
            optimizer.state[main] = extent

    def reader(self, slot: str) -> Callable[[torch.nn.Parameter], torch.Tensor]:
        """Gives a moment of a whole local parameter; the ranks that hold copies of the parameter call it together."""

        def read(parameter: torch.nn.Parameter) -> torch.Tensor:
            flat = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
            if id(parameter) in self._shards:
                main, lo, hi, optimizer = self._shards[id(parameter)]
                flat[lo:hi] = optimizer.state[main][slot]
            dist.all_reduce(flat, group=self._group_of[id(parameter)])
            return flat.view(parameter.shape)

        return read
