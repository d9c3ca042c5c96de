"""Pipeline parallelism: micro-batches pass through stages on several ranks, forward and, with gradients, back.

Every rank of a cell has every micro-batch, so each knows the shape of what comes and micro-batches may differ in
length. Activations and gradients travel as they are, each message under a tag of its own; sends do not wait, receives
do, and the order of work is that of `schedules.py`. The last stage alone evaluates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from millrace.trainers.backends.models.stages import PipelineStage
from millrace.trainers.backends.parallel.grid import PP, Groups
from millrace.trainers.backends.parallel.schedules import actions, chunks_of, forwards
from millrace.trainers.phase_clock import COLLECTIVES, Clock

Forward = Callable[[int, int, torch.Tensor | None], torch.Tensor]
"""(chunk, micro, hidden states of the stage before or None) -> hidden states, or the loss on the last stage."""


@dataclass(frozen=True, slots=True, eq=False)
class Pipe:
    """The ranks of a pipeline in the order of their stages. schedule: see `schedules.py`."""

    group: dist.ProcessGroup
    rank: int
    size: int
    schedule: str
    clock: Clock

    @property
    def stages(self) -> int:
        """Of all ranks together."""
        return self.size * chunks_of(self.schedule)

    def stage(self, chunk: int) -> PipelineStage:
        """The stage of this rank's chunk."""
        return PipelineStage(chunk * self.size + self.rank, self.stages)

    def missing(self, micros: int) -> int:
        """Idle micro-batches that fill `micros` up to what the schedule takes."""
        return -micros % self.size if chunks_of(self.schedule) > 1 else 0

    @property
    def own_stages(self) -> list[PipelineStage]:
        """The stages of this rank, by chunk."""
        return [self.stage(chunk) for chunk in range(chunks_of(self.schedule))]

    @property
    def last(self) -> bool:
        """Whether this rank has the last stage."""
        return self.rank == self.size - 1


def pipe_of(groups: Groups, schedule: str, clock: Clock) -> Pipe | None:
    """The pipeline of this rank, if there is one."""
    if PP not in groups.by_axis:
        return None
    return Pipe(groups.by_axis[PP], groups.index(PP), groups.size(PP), schedule, clock)


class _Post:
    """Messages between stages during one pass of several micro-batches."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._sent: list[tuple[dist.Work | None, torch.Tensor]] = []

    def send(self, tensor: torch.Tensor, stage: int, backward: bool, micro: int) -> None:
        """To `stage`, without waiting."""
        pipe, tensor = self._pipe, tensor.detach().contiguous()
        work = dist.isend(tensor, group=pipe.group, group_dst=stage % pipe.size, tag=self._tag(stage, backward, micro))
        self._sent.append((work, tensor))

    def receive(self, into: torch.Tensor, at: int, source: int, backward: bool, micro: int) -> torch.Tensor:
        """What stage `source` sent to stage `at`, here."""
        pipe = self._pipe
        with pipe.clock.phase(COLLECTIVES):
            dist.recv(into, group=pipe.group, group_src=source % pipe.size, tag=self._tag(at, backward, micro))
        return into

    def _tag(self, stage: int, backward: bool, micro: int) -> int:
        return (micro * self._pipe.stages + stage) * 2 + backward

    def finish(self) -> None:
        """Waits until all has arrived."""
        with self._pipe.clock.phase(COLLECTIVES):
            for work, _ in self._sent:
                if work is not None:
                    work.wait()
        self._sent.clear()


def relay(pipe: Pipe, shapes: Sequence[tuple[int, ...]], like: torch.Tensor, forward: Forward) -> list[torch.Tensor]:
    """Passes micro-batches through all stages before the last, without gradients; what that one is given of each, where
    it is, and nothing elsewhere. shapes: of the hidden states of each micro-batch; like: a tensor of their dtype and
    device."""
    post, rows = _Post(pipe), []
    with torch.no_grad():
        for _, chunk, micro in forwards(chunks_of(pipe.schedule), len(shapes)):
            stage = pipe.stage(chunk)
            hidden = None
            if not stage.first:
                hidden = post.receive(like.new_empty(shapes[micro]), stage.index, stage.index - 1, False, micro)
            if not stage.last:
                post.send(forward(chunk, micro, hidden), stage.index + 1, False, micro)
            elif hidden is not None:
                rows.append(hidden)
    post.finish()
    return rows


def run(
    pipe: Pipe,
    shapes: Sequence[tuple[int, ...]],
    like: torch.Tensor,
    forward: Forward,
    before_backward: Callable[[int, int], None],
) -> None:
    """Passes micro-batches through all stages and their gradients back, which add up in the parameters.
    before_backward(chunk, micro): called before each backward pass."""
    post = _Post(pipe)
    in_flight: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
    for backward, chunk, micro in actions(pipe.schedule, pipe.size, pipe.rank, len(shapes)):
        stage = pipe.stage(chunk)
        if not backward:
            hidden = None
            with pipe.clock.phase("forward"):
                if not stage.first:
                    hidden = post.receive(like.new_empty(shapes[micro]), stage.index, stage.index - 1, False, micro)
                    hidden.requires_grad_()
                out = forward(chunk, micro, hidden)
            if not stage.last:
                post.send(out, stage.index + 1, False, micro)
            in_flight[chunk, micro] = hidden, out
            continue
        hidden, out = in_flight.pop((chunk, micro))
        before_backward(chunk, micro)
        with pipe.clock.phase("backward"):
            gradient = None
            if not stage.last:
                gradient = post.receive(torch.empty_like(out), stage.index, stage.index + 1, True, micro)
            torch.autograd.backward(out, gradient)
        if hidden is not None and hidden.grad is not None:
            post.send(hidden.grad, stage.index - 1, True, micro)
    post.finish()


def stage_input(hidden: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The argument by which a stage is given what the one before it passed on."""
    return {} if hidden is None else {"inputs_embeds": hidden}


def tell(
    pipe: Pipe, rows: Sequence[torch.Tensor] | None, sizes: Sequence[int], device: torch.device
) -> list[torch.Tensor]:
    """Rows float32 of `sizes` that the last rank has, on all of them."""
    flat = torch.cat(list(rows)) if rows is not None else torch.empty(sum(sizes), device=device)
    with pipe.clock.phase(COLLECTIVES):
        dist.broadcast(flat, group=pipe.group, group_src=pipe.size - 1)
    return list(flat.split(list(sizes)))
