"""What only the in-process engine has: its thread, its death, its batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MiniMaxM2Config

from millrace.infra.engines.base import LabelSpan, Sampling, token_versions
from millrace.infra.engines.inprocess import engine as inprocess
from millrace.infra.engines.inprocess.batch import truncate
from millrace.infra.engines.inprocess.engine import InprocessEngine
from millrace.infra.errors import EngineError, EngineUnavailable
from tests.support.engines import complete, differences, until
from tests.support.tiny_model import CONTEXT, EOS, VOCAB, write_model

PROMPT = [22, 10, 14, 40]
MIXTURE = MiniMaxM2Config(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=CONTEXT,
    bos_token_id=None, eos_token_id=EOS, pad_token_id=0,
)  # fmt: skip


@pytest.fixture
async def engine(models: tuple[Path, Path]) -> AsyncIterator[InprocessEngine]:
    found = InprocessEngine(models[0], max_rows=5)
    yield found
    await found.close()


async def test_rows_come_and_go_without_disturbing_each_other(
    engine: InprocessEngine, models: tuple[Path, Path]
) -> None:
    """More requests than rows, of unequal lengths, one left early: every answer is exact."""

    async def ask(number: int) -> None:
        prompt = PROMPT * (1 + number % 7)
        sampling = Sampling(3 + 11 * (number % 5), n=1 + number % 3, ignore_eos=True, seed=number)
        for choice in await complete(engine, prompt, sampling, request_id=str(number), stream=number % 2 == 0):
            assert len(choice.token_ids) == sampling.max_tokens
            assert max(differences(models[0], prompt, choice.token_ids, choice.logprobs)) < 1e-5

    leaving = engine.generate(PROMPT, Sampling(500, ignore_eos=True), request_id="leaving")
    await anext(leaving)
    await asyncio.gather(*(ask(number) for number in range(12)), leaving.aclose())


async def test_weights_of_another_shape_are_refused_and_change_nothing(
    engine: InprocessEngine, models: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match="not of this architecture"):
        await engine.load(write_model(tmp_path / "wide", hidden=96))
    (choice,) = await complete(engine, PROMPT, Sampling(5, ignore_eos=True))
    assert max(differences(models[0], PROMPT, choice.token_ids, choice.logprobs)) < 1e-5


async def test_weights_under_the_names_of_files_are_the_models(tmp_path: Path) -> None:
    """Of a mixture of experts, which files hold one by one, with a bias that is no parameter."""
    folders = [write_model(tmp_path / str(seed), seed, config=MIXTURE) for seed in range(2)]
    engine = InprocessEngine(folders[0])
    await engine.load(folders[1])
    (choice,) = await complete(engine, PROMPT, Sampling(8, ignore_eos=True, seed=0))
    assert max(differences(folders[1], PROMPT, choice.token_ids, choice.logprobs)) < 1e-5
    await engine.close()


async def test_closing_fails_what_is_in_flight(models: tuple[Path, Path]) -> None:
    engine = InprocessEngine(models[0])
    running = engine.generate(PROMPT, Sampling(900, ignore_eos=True), request_id="r")
    await anext(running)
    await engine.close()
    with pytest.raises(EngineUnavailable, match="closed"):
        assert [chunk async for chunk in running]
    with pytest.raises(EngineUnavailable):
        await complete(engine, PROMPT, Sampling(1))
    assert not await engine.health()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_dead_thread_is_told_to_everybody(models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = InprocessEngine(models[0])

    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(inprocess, "draw", broken)
    with pytest.raises(EngineUnavailable, match="out of memory"):
        await complete(engine, PROMPT, Sampling(1))
    await until(lambda: engine.death is not None)
    assert not await engine.health()
    with pytest.raises(EngineUnavailable):
        await engine.pause()
    await engine.close()


@given(
    st.lists(st.floats(-8, 8), min_size=2, max_size=30, unique=True),
    st.integers(0, 40),
    st.floats(0.01, 1.0),
)
def test_truncation_keeps_the_best_and_no_more_than_asked(scores: list[float], top_k: int, top_p: float) -> None:
    given_scores = torch.tensor(scores, dtype=torch.float64)
    kept = truncate(given_scores, top_k, top_p).isfinite()
    assert kept[given_scores.argmax()]
    assert given_scores[kept].min() >= (given_scores[~kept].max() if not kept.all() else float("-inf"))
    if top_k:
        assert kept.sum() <= top_k
        within = given_scores.topk(min(top_k, len(scores))).values
    else:
        within = given_scores
    mass = (given_scores[kept] - within.logsumexp(0)).exp().sum().item()
    assert mass >= min(top_p, 1.0) - 1e-9 or (top_p == 1.0 and mass > 1 - 1e-9)
    least = (given_scores[kept].min() - within.logsumexp(0)).exp().item()
    assert top_p == 1.0 or mass - least < top_p + 1e-9


def test_versions_of_tokens() -> None:
    spans = [LabelSpan("p@4", 0, 2), LabelSpan("default", 2, 3), LabelSpan("other@9", 3, 4), LabelSpan("p@5", 4, 6)]
    assert token_versions(spans, 7, "p").tolist() == [4, 4, -1, -1, 5, 5, -1]
