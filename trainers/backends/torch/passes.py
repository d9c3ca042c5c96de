"""Forward and backward passes of one model in training, on the part of it that this rank has.

A micro-batch passes through the whole model, or through this rank's slices of its row (`parallel/context.py`), or from
stage to stage (`parallel/pipeline.py`), or both. Whoever evaluates a pass sees the whole micro-batch in every case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from millrace.trainers.algorithms.base import Run
from millrace.trainers.backends.models.build import inference_mode
from millrace.trainers.backends.models.forward import ForwardPass
from millrace.trainers.backends.parallel import pipeline
from millrace.trainers.backends.parallel.context import Context, ContextPass, context_pass
from millrace.trainers.backends.parallel.pipeline import Pipe
from millrace.trainers.backends.parallel.slices import pad_row
from millrace.trainers.backends.torch.compute import Compute
from millrace.trainers.batches.packing import MicroBatch, pack
from millrace.trainers.phase_clock import Clock


@dataclass(frozen=True, slots=True, eq=False)
class Passes:
    """chunks: the model, or this rank's stages of it. unit: rows are filled up to its multiples, since so many ranks
    share them. fusion: whether formulas over logits are compiled."""

    chunks: Sequence[PreTrainedModel]
    context: Context | None
    pipe: Pipe | None
    unit: int
    device: torch.device
    compute: Compute
    clock: Clock
    fusion: bool = False

    def one(
        self,
        micro: MicroBatch,
        chunk: int = -1,
        hidden: torch.Tensor | None = None,
        teacher: Passes | None = None,
        teacher_hidden: torch.Tensor | None = None,
    ) -> ForwardPass | ContextPass:
        """Of one micro-batch through a chunk, which is given what the stage before it made (none: tokens)."""
        full_pass = ForwardPass(
            self.chunks[chunk],
            pad_row(micro, self.unit).to(self.device),
            None if teacher is None else teacher.chunks[-1],
            logits=self.compute.logits,
            fusion=self.fusion,
            fed=pipeline.stage_input(hidden),
            teacher_fed=pipeline.stage_input(teacher_hidden),
        )
        return full_pass if self.context is None else context_pass(full_pass, self.context)

    def read(
        self, micros: Sequence[MicroBatch], of: Callable[[Run], torch.Tensor], sizes: Sequence[int]
    ) -> list[torch.Tensor]:
        """The first `sizes` of what `of` makes of a pass of each micro-batch, float32, without gradient, on every rank
        of the cell and on the CPU."""
        with inference_mode(self.chunks):
            if self.pipe is None:
                return [of(self.one(micro))[:size].cpu() for micro, size in zip(micros, sizes, strict=True)]
            rows = None
            hidden = self._relay(micros)
            if self.pipe.last:
                rows = [
                    of(self.one(micro, hidden=stage_rows))[:size]
                    for micro, stage_rows, size in zip(micros, hidden, sizes, strict=True)
                ]
            return [row.cpu() for row in pipeline.tell(self.pipe, rows, sizes, self.device)]

    def learn(
        self,
        micros: Sequence[MicroBatch],
        loss: Callable[[Run], torch.Tensor],
        teacher: Passes | None,
    ) -> None:
        """A backward pass from the `loss` of each micro-batch, evaluated in their order where the head is. Gradients
        add up in the parameters; FSDP reduces them with the last."""
        if self.pipe is None:
            for index, micro in enumerate(micros):
                self._sync(0, last=index == len(micros) - 1)
                with self.clock.phase("forward"):
                    result = loss(self.one(micro, teacher=teacher))
                with self.clock.phase("backward"):
                    result.backward()
            return
        pipe = self.pipe
        row = [*micros, *(pack([]) for _ in range(pipe.missing(len(micros))))]
        teacher_rows = teacher._relay(row) if teacher is not None else []

        def forward(chunk: int, index: int, hidden: torch.Tensor | None) -> torch.Tensor:
            if not pipe.stage(chunk).last:
                return self.one(row[index], chunk, hidden).hidden().to(self._dtype)
            return loss(self.one(row[index], chunk, hidden, teacher, teacher_rows[index] if teacher_rows else None))

        def before_backward(chunk: int, index: int) -> None:
            self._sync(chunk, last=index == len(row) - 1)

        pipeline.run(pipe, self._shapes(row), self._like, forward, before_backward)

    def _relay(self, micros: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """What the last stage is given of each micro-batch, where it is; nothing elsewhere."""
        if self.pipe is None:
            return []

        def forward(chunk: int, index: int, hidden: torch.Tensor | None) -> torch.Tensor:
            return self.one(micros[index], chunk, hidden).hidden().to(self._dtype)

        return pipeline.relay(self.pipe, self._shapes(micros), self._like, forward)

    def _sync(self, chunk: int, *, last: bool) -> None:
        model = self.chunks[chunk]
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)

    @property
    def _dtype(self) -> torch.dtype:
        """Of the hidden states between stages."""
        return torch.bfloat16 if self.compute.bf16 else torch.float32

    def _shapes(self, micros: Sequence[MicroBatch]) -> list[tuple[int, ...]]:
        width = int(self.chunks[0].config.hidden_size)
        return [(1, -(-micro.tokens.shape[1] // self.unit), width) for micro in micros]

    @property
    def _like(self) -> torch.Tensor:
        return torch.empty(0, dtype=self._dtype, device=self.device)
