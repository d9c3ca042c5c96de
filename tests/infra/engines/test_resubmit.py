"""Aborted choices go on: with a scripted engine for every way to be cut, with real engines for the numbers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.infra.engines.base import Chunk, Engine, LabelSpan, Sampling, Usage
from millrace.infra.engines.resubmit import FRUITLESS, ResubmittingEngine
from tests.support.engines import complete

PROMPT = [22, 10, 14]


@dataclass
class ScriptedEngine(Engine):
    """Samples 100, 101, ... by place in the choice. `cuts`: after how many tokens each part in turn is aborted; then it
    ends by itself. Part k is of version k."""

    cuts: list[int]
    length: int = 10
    asked: list[tuple[list[int], Sampling, str]] = field(default_factory=list)

    kind = "scripted"

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str, stream: bool = True
    ) -> AsyncGenerator[Chunk, None]:
        part = len(self.asked)
        self.asked.append((list(prompt_ids), sampling, request_id))
        done = len(prompt_ids) - len(PROMPT)
        most = min(sampling.max_tokens, self.length - done)
        for index in range(sampling.n):
            # of several choices the last is cut
            cut = self.cuts[part] if part < len(self.cuts) and index == sampling.n - 1 else most + 1
            count = min(most, cut)
            reason = "abort" if cut <= most else "length" if most == sampling.max_tokens else "stop"
            spans = (LabelSpan(f"p@{part}", 0, count),) if count else ()
            ids = [100 + done + at for at in range(count)]
            logprobs = [-float(id) for id in ids]
            usage = Usage(len(prompt_ids), count, 0) if index == sampling.n - 1 else None
            if stream:
                for id, logprob in zip(ids, logprobs, strict=True):
                    yield Chunk(index, [id], [logprob])
                yield Chunk(index, [], [], reason, None, spans, usage)
            else:
                yield Chunk(index, ids, logprobs, reason, None, spans, usage)

    async def health(self) -> bool:
        return True

    async def weight_version(self) -> str:
        return "p@0"

    async def close(self) -> None:
        """Nothing to close."""


@pytest.mark.parametrize("stream", [True, False])
@given(cuts=st.lists(st.integers(0, 4), max_size=5), tokens=st.integers(1, 14), n=st.integers(1, 3))
async def test_however_it_is_cut_it_is_one_choice(stream: bool, cuts: list[int], tokens: int, n: int) -> None:
    engine = ScriptedEngine(cuts)
    whole = ResubmittingEngine(engine)
    found = await complete(whole, PROMPT, Sampling(tokens, n=n), stream=stream)
    length = min(tokens, 10)
    assert len(found) == n
    for choice in found:
        assert choice.token_ids == [100 + at for at in range(length)]
        assert choice.logprobs == [-float(id) for id in choice.token_ids]
        assert choice.finish_reason == ("length" if tokens <= 10 else "stop") or sum(cuts) >= length
        assert [span.start for span in choice.spans] == [0, *(span.end for span in choice.spans[:-1])]
        assert choice.spans[-1].end == length
    labels = [span.label for span in found[-1].spans]
    assert labels == sorted(set(labels)), "each part keeps the version that sampled it"
    assert found[-1].usage is not None
    assert found[-1].usage.prompt == len(PROMPT)
    for number, (prompt, sampling, _) in enumerate(engine.asked[1:], 1):
        so_far = len(prompt) - len(PROMPT)
        assert prompt == [*PROMPT, *range(100, 100 + so_far)]
        assert (sampling.n, sampling.max_tokens) == (1, tokens - so_far), number
    assert len({request for _, _, request in engine.asked}) == len(engine.asked)
    assert whole.recomputed == sum(len(prompt) for prompt, _, _ in engine.asked[1:])


async def test_seeds_go_on_too() -> None:
    engine = ScriptedEngine([3])
    await complete(ResubmittingEngine(engine), PROMPT, Sampling(8, seed=7))
    assert [sampling.seed for _, sampling, _ in engine.asked] == [7, 10], "not the same draws again"


async def test_stop_strings_are_looked_for_in_the_whole_reply() -> None:
    engine = ScriptedEngine([3])
    (found,) = await complete(ResubmittingEngine(engine), PROMPT, Sampling(8, stop=("x",)), stream=False)
    assert engine.asked[1][0] == PROMPT, "nobody was given any of it: it begins anew"
    assert found.spans == (LabelSpan("p@1", 0, 8),)
    engine = ScriptedEngine([3])
    (found,) = await complete(ResubmittingEngine(engine), PROMPT, Sampling(8, stop=("x",)))
    assert (found.finish_reason, len(found.token_ids), len(engine.asked)) == ("abort", 3, 1)


async def test_an_engine_that_only_aborts_is_believed_in_the_end() -> None:
    engine = ScriptedEngine([2, *[0] * 99])
    (found,) = await complete(ResubmittingEngine(engine), PROMPT, Sampling(8))
    assert (found.finish_reason, found.token_ids) == ("abort", [100, 101])
    assert len(engine.asked) == 1 + FRUITLESS


async def test_leaving_early_ends_the_part_that_runs() -> None:
    engine = ScriptedEngine([2])
    async with aclosing(ResubmittingEngine(engine).generate(PROMPT, Sampling(8), request_id="r")) as chunks:
        async for chunk in chunks:
            if chunk.token_ids == [104]:
                break
    assert len(engine.asked) == 2


async def test_the_rest_is_the_engines_own() -> None:
    engine = ScriptedEngine([])
    whole = ResubmittingEngine(engine)
    whole.adapter = "p@3"
    assert (engine.adapter, whole.adapter, whole.kind) == ("p@3", "p@3", "scripted")
    assert await whole.health()
    assert await whole.weight_version() == "p@0"
    await whole.close()
