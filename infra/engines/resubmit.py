"""Going on after an abort: an engine that is paused for new weights by ending its requests loses none of them.

A choice that the engine ends with `abort` is asked for again: the prompt and what was sampled of it so far, with what
is left of its tokens. The parts are one choice to whoever listens.

Invariants: no token is dropped or sampled twice; spans, log-probabilities and the order of chunks are those of one
request, so each token keeps the version that sampled it; a choice that was given to nobody yet and has stop strings,
penalties or a grammar begins anew, since an engine applies them to what it samples only; one that was goes on as
aborted. Whoever leaves the iterator ends the part that runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from millrace.infra.engines.base import Chunk, Engine, LabelSpan, Sampling, Usage
from millrace.schemas import bounds

ABORT = "abort"
FRUITLESS = 8
"""parts of a choice in a row that may bring no token before its abort is believed"""


class ResubmittingEngine(Engine):
    """`engine`, whose aborted choices go on. `recomputed` counts the tokens that were sent again after they had been
    computed once, the prompt's included."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.kind = engine.kind
        self.recomputed = 0

    @property
    def adapter(self) -> str | None:
        """As of the engine itself."""
        return self._engine.adapter

    @adapter.setter
    def adapter(self, name: str | None) -> None:
        self._engine.adapter = name

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str, stream: bool = True
    ) -> AsyncGenerator[Chunk, None]:
        aborts: list[_Choice] = []
        ends, usage = 0, None
        last: Chunk | None = None  # the end of the request waits for the usage of all its parts
        async with aclosing(
            self._engine.generate(prompt_ids, sampling, request_id=request_id, stream=stream)
        ) as chunks:
            parts: dict[int, _Choice] = {}
            async for chunk in chunks:
                usage = chunk.usage or usage
                choice = parts.setdefault(chunk.index, _Choice(chunk.index))
                choice.take(chunk)
                if chunk.finish_reason == ABORT and choice.may_go_on(sampling, stream):
                    aborts.append(choice)
                    if stream and chunk.token_ids:
                        yield choice.more()
                elif chunk.finish_reason is not None and ends + len(aborts) + 1 == sampling.n:
                    last = chunk
                else:
                    ends += chunk.finish_reason is not None
                    yield chunk
        for choice in aborts:
            if last is not None:
                yield replace(last, usage=None)
            last = None
            async with aclosing(self._go_on(choice, prompt_ids, sampling, request_id, stream)) as chunks:
                async for chunk in chunks:
                    if chunk.usage is not None:
                        usage = _sum(usage, chunk.usage)
                    if chunk.finish_reason is not None:
                        last = chunk
                    else:
                        yield chunk
        if last is not None:
            yield replace(last, usage=usage)

    async def health(self) -> bool:
        return await self._engine.health()

    async def weight_version(self) -> str:
        return await self._engine.weight_version()

    async def close(self) -> None:
        await self._engine.close()

    async def _go_on(
        self, choice: _Choice, prompt_ids: Sequence[int], sampling: Sampling, request_id: str, stream: bool
    ) -> AsyncGenerator[Chunk, None]:
        """The rest of a broken choice, until an end that is none of ours."""
        number = fruitless = 0
        usage: Usage | None = None
        while True:
            number += 1
            if sampling.remembers:
                choice.begin_anew()
            before = len(choice.ids)
            self.recomputed += len(prompt_ids) + before
            rest = replace(
                sampling,
                n=1,
                max_tokens=sampling.max_tokens - before,
                seed=None if sampling.seed is None else seed_after(sampling.seed, before),
            )
            part = self._engine.generate(
                [*prompt_ids, *choice.ids], rest, request_id=f"{request_id}-{choice.index}-{number}", stream=stream
            )
            async with aclosing(part) as chunks:
                async for chunk in chunks:
                    usage = _sum(usage, chunk.usage) if chunk.usage else usage
                    choice.take(chunk)
                    if chunk.finish_reason is None:
                        yield choice.more()
            fruitless = 0 if len(choice.ids) > before else fruitless + 1
            last = choice.last
            if last.finish_reason != ABORT or fruitless >= FRUITLESS or not choice.may_go_on(sampling, stream):
                yield choice.end(stream, usage)
                return
            if stream and last.token_ids:
                yield choice.more()


@dataclass(slots=True)
class _Choice:
    """One choice as far as it came. last: its newest chunk."""

    index: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[Sequence[tuple[int, float]]] = field(default_factory=list)
    spans: list[LabelSpan] = field(default_factory=list)
    last: Chunk = field(default_factory=lambda: Chunk(0, [], []))
    offset_of_part: int = 0
    """tokens before the part that runs"""

    def take(self, chunk: Chunk) -> None:
        """What a part sampled; its spans count from the part's own first token."""
        self.ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.tops += chunk.tops
        self.last = chunk
        if chunk.finish_reason is not None:
            for span in chunk.spans:
                self._append(span.label, span.start + self.offset_of_part, span.end + self.offset_of_part)
            self.offset_of_part = len(self.ids)

    def may_go_on(self, sampling: Sampling, stream: bool) -> bool:
        """Whether there are tokens left to ask for, and an engine would end it where it should."""
        return len(self.ids) < sampling.max_tokens and not (sampling.remembers and stream and self.ids)

    def begin_anew(self) -> None:
        """Forget what nobody was given."""
        self.ids, self.logprobs, self.tops, self.spans, self.offset_of_part = [], [], [], [], 0

    def more(self) -> Chunk:
        """The newest chunk, with others to come."""
        return replace(self.last, index=self.index, finish_reason=None, stop_reason=None, spans=(), usage=None)

    def end(self, stream: bool, usage: Usage | None) -> Chunk:
        """The last chunk of the whole choice: with all of its tokens where nothing was streamed."""
        last = replace(self.last, index=self.index, usage=usage, spans=tuple(self.spans))
        return last if stream else replace(last, token_ids=self.ids, logprobs=self.logprobs, tops=self.tops)

    def _append(self, label: str, start: int, end: int) -> None:
        if self.spans and self.spans[-1].label == label and self.spans[-1].end == start:
            start = self.spans.pop().start
        if end > start:
            self.spans.append(LabelSpan(label, start, end))


def seed_after(seed: int, by: int) -> int:
    """Another seed, of the 64 bits that engines take: behind the largest comes the smallest."""
    return (seed + by + bounds.SEED + 1) % (2 * bounds.SEED + 2) - bounds.SEED - 1


def _sum(first: Usage | None, later: Usage) -> Usage:
    """Prompt of the first part, tokens of all."""
    if first is None:
        return Usage(0, later.completion, 0)
    return Usage(first.prompt, first.completion + later.completion, first.cached)
