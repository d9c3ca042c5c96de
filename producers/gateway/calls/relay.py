"""The reply of one call, whichever engines sample it: what one that fails or hangs leaves, another goes on with.

Invariants: whoever listens gets each token once, in order, and the end once; a call moves to another engine only as
long as the parts are one draw (no token was given yet; or it has one choice, whose rest depends on the tokens alone,
and any version may answer); each token keeps the label that its engine gave it. The labels of tokens come with the end
of a part: where an engine ends its calls, as one does that shuts down, they come too; where it fails, the tokens behind
its last labels have none: they are of no version, and never trained on. What another model sampled is given to nobody
beyond what was streamed before its label came."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from millrace.dialects.errors import of_engine
from millrace.infra import faults, telemetry
from millrace.infra.engines.base import ABORT, Chunk, LabelSpan, Sampling, Usage
from millrace.infra.engines.resubmit import seed_after
from millrace.infra.errors import EngineError, EngineRejected, EngineTimeout, EngineUnavailable
from millrace.producers.gateway.calls.fleet import HANGS, EngineTarget, Fleet, UnderWay
from millrace.producers.gateway.calls.routing import RouteWish
from millrace.schemas.labels import parse_label

logger = logging.getLogger(__name__)

_moves = telemetry.counter(
    "millrace.gateway.moves", "{call}", "calls that another engine went on with, by why and by the kind that they left"
)


@dataclass(slots=True, eq=False)
class Relay:
    """That of one call. `target`: the engine that has it, or had it last; `on_move` gets each further one."""

    fleet: Fleet
    target: EngineTarget
    wish: RouteWish
    prompt: Sequence[int]
    sampling: Sampling
    request_id: str
    on_move: Callable[[EngineTarget], None]
    _ids: list[int] = field(default_factory=list)
    """that were given, of the one choice"""
    _count: int = 0
    """tokens that were given, of all choices"""
    _parts: int = 1
    _spans: list[LabelSpan] = field(default_factory=list)
    """labels of the parts that engines ended before the reply's end"""

    async def chunks(self, *, stream: bool) -> AsyncGenerator[Chunk, None]:
        """The reply. Raises EngineError where nobody can go on with it."""
        while True:
            start = len(self._ids)
            try:
                async with aclosing(self._part(stream=stream)) as chunks:
                    async for chunk in chunks:
                        yield self._place(chunk, start)
                self.target.trouble = ""  # whatever it was: it answered this call
                return
            except EngineError as error:
                answer = of_engine(error)
                if answer.status < 500 and isinstance(error, EngineRejected):
                    raise
                if answer.status >= 500:
                    # A refusal that is not the client's fault is about our key.
                    self.fleet.doubt(self.target, "it refuses our key" if isinstance(error, EngineRejected) else "")
                successor = self._successor()
                if successor is None:
                    raise
                self.wish = self._next_wish()
                _moves.add(1, reason=self._reason(error), engine=self.target.engine.kind)
                logger.warning(
                    "%s goes on at %s, behind %d tokens: %s", self.request_id, successor.url, self._count, error
                )
            self.target = successor
            self.on_move(successor)
            faults.point("relay.moved")
            self._parts += 1

    def _reason(self, error: EngineError) -> str:
        """Why the call leaves its engine, for telemetry."""
        trouble = self.target.trouble
        if isinstance(error, EngineTimeout) or trouble == HANGS:
            return "hang"
        return "trouble" if trouble else "drain" if self.target.is_draining else "gone"

    def _next_wish(self) -> RouteWish:
        return self.wish._replace(failures=(*self.wish.failures, self.target.url))

    def _successor(self) -> EngineTarget | None:
        """The engine that would go on now."""
        return self.fleet.best(self._next_wish()) if self._may_move() else None

    def _may_move(self) -> bool:
        if not self._count:
            return True
        is_one_draw = self.sampling.n == 1 and not self.sampling.remembers and self.wish.version is None
        return is_one_draw and len(self._ids) < self.sampling.max_tokens

    async def _part(self, *, stream: bool) -> AsyncGenerator[Chunk, None]:
        """What the present engine samples."""
        target, ids, sampling = self.target, self._ids, self.sampling
        request_id = self.request_id if self._parts == 1 else f"{self.request_id}-e{self._parts}"
        prompt = self.prompt
        if ids:
            seed = None if sampling.seed is None else seed_after(sampling.seed, len(ids))
            sampling = replace(sampling, max_tokens=sampling.max_tokens - len(ids), seed=seed)
            prompt = [*prompt, *ids]
        loop, call = asyncio.get_running_loop(), UnderWay(self.wish, self._may_move)
        began, start, before, tokens = loop.time(), len(ids), self._count, 0
        self.fleet.begin(target, call)
        try:
            generator = target.engine.generate(prompt, sampling, request_id=request_id, stream=stream)
            async with aclosing(generator) as chunks:
                call.wait(began)
                async for chunk in chunks:
                    call.waits_since = None
                    self._check(chunk)
                    self._count += len(chunk.token_ids)
                    if sampling.n == 1:
                        ids += chunk.token_ids
                    if chunk.finish_reason == ABORT and self._successor() is not None:
                        self._spans += self._shift(chunk.spans, start)
                        if chunk.token_ids:
                            yield replace(chunk, finish_reason=None, stop_reason=None, spans=(), usage=None)
                        raise EngineUnavailable(f"{target.url} ended its calls")
                    yield chunk
                    call.wait(loop.time())
            tokens = self._count - before  # how long one hung says nothing of its speed once it answers again
        except asyncio.CancelledError as error:
            if call.was_broken_off():
                raise EngineTimeout(f"{target.url} hangs") from error
            raise
        finally:
            self.fleet.end(target, call, loop.time() - began, tokens)

    def _check(self, chunk: Chunk) -> None:
        """Raises EngineUnavailable for what another model sampled: nobody asked for that."""
        for span in chunk.spans:
            label = parse_label(span.label)
            if label is not None and label[0] != self.fleet.policy:
                self.fleet.doubt(self.target, f"it serves {span.label}")
                raise EngineUnavailable(f"{self.target.url} serves {span.label}, which is not {self.fleet.policy}'s")

    @staticmethod
    def _shift(spans: Sequence[LabelSpan], by: int) -> list[LabelSpan]:
        return [LabelSpan(span.label, span.start + by, span.end + by) for span in spans]

    def _place(self, chunk: Chunk, start: int) -> Chunk:
        """A chunk of a part that begins behind `start` tokens, as one of the whole reply."""
        if not start or chunk.finish_reason is None:
            return chunk
        spans = (*self._spans, *self._shift(chunk.spans, start))
        usage = chunk.usage
        if usage is not None:
            usage = Usage(len(self.prompt), usage.completion + start, min(usage.cached, len(self.prompt)))
        return replace(chunk, spans=spans, usage=usage)
