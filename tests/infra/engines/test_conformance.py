"""What every engine and its control keep: the in-process one, the same as a server, and vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import pytest

from millrace.infra.engines.base import Chunk, LabelSpan, Sampling, token_versions
from millrace.infra.errors import EngineError, EngineRejected
from tests.infra.engines.conftest import Rig
from tests.support.engines import complete, differences, ending_prompt, join, plain_logprobs, until
from tests.support.tiny_model import EOS, VOCAB

PROMPT = [22, 10, 14, 40]
EXACT = 1e-5


async def test_logprobs_are_those_of_a_plain_forward(rig: Rig) -> None:
    prompts = [PROMPT + [5] * length for length in (0, 3, 40, 200)]
    answers = await asyncio.gather(
        *(
            complete(rig.engine, prompt, Sampling(40, temperature=0.7, n=2, ignore_eos=True), request_id=f"r{i}")
            for i, prompt in enumerate(prompts)
        )
    )
    for prompt, choices in zip(prompts, answers, strict=True):
        assert [choice.index for choice in choices] == [0, 1]
        for choice in choices:
            assert len(choice.token_ids) == 40
            assert max(differences(rig.models[0], prompt, choice.token_ids, choice.logprobs)) < EXACT


async def test_a_stream_ends_each_choice_once_with_spans_and_the_request_with_usage(rig: Rig) -> None:
    chunks = [c async for c in rig.engine.generate(PROMPT, Sampling(5, n=3, ignore_eos=True), request_id="r")]
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage[:2] == (len(PROMPT), 15)
    for index in range(3):
        own = [chunk for chunk in chunks if chunk.index == index]
        assert [c.finish_reason for c in own[:-1]] == [None] * (len(own) - 1)
        assert all(c.spans == () for c in own[:-1])
        whole = join(own)
        assert (whole.finish_reason, whole.stop_reason) == ("length", None)
        assert whole.spans == (LabelSpan("policy@0", 0, 5),)


async def test_a_stream_is_a_stream(rig: Rig) -> None:
    """Paused after the first chunk, the engine cannot have made the last token: the chunk left before it existed."""
    for number in range(6):  # on a busy machine a reply may end before the pause
        generated = rig.engine.generate(PROMPT, Sampling(450, ignore_eos=True), request_id=f"r{number}")
        async with aclosing(generated) as chunks:
            parts = [await _begin(rig, chunks)]
            rest = asyncio.ensure_future(_drain(chunks))
            done, _ = await asyncio.wait((rest,), timeout=0.5)
            await rig.control.resume()
            parts += await rest
        assert len(join(parts).token_ids) == 450
        if not done:
            break
    assert not done


async def test_plain_and_streamed_give_the_same(rig: Rig) -> None:
    sampling = Sampling(20, seed=7, n=2, top_logprobs=3)
    streamed = await complete(rig.engine, PROMPT, sampling)
    plain = await complete(rig.engine, PROMPT, sampling, stream=False)
    assert [one.token_ids for one in streamed] == [one.token_ids for one in plain]
    assert [one.finish_reason for one in streamed] == [one.finish_reason for one in plain]
    assert [one.spans for one in streamed] == [one.spans for one in plain]
    assert [len(one.tops) for one in streamed] == [len(one.tops) for one in plain]
    assert plain[0].token_ids != plain[1].token_ids
    # With the choice that ended last; how much of the prompt the second found in a cache is its affair.
    assert [one.usage[:2] for one in [*plain, *streamed] if one.usage] == [(len(PROMPT), 40)] * 2


async def test_greedy_takes_the_most_likely(rig: Rig) -> None:
    (choice,) = await complete(rig.engine, PROMPT, Sampling(12, temperature=0, ignore_eos=True, top_logprobs=2))
    plain = plain_logprobs(rig.models[0], PROMPT, choice.token_ids)
    assert choice.token_ids == plain.argmax(-1).tolist()
    for position, tops in enumerate(choice.tops):
        best = plain[position].topk(2)
        assert [token for token, _ in tops] == best.indices.tolist()
        assert [value for _, value in tops] == pytest.approx(best.values.tolist(), abs=EXACT)


async def test_rivals_are_the_most_likely_tokens_even_when_another_was_drawn(rig: Rig) -> None:
    sampling = Sampling(12, temperature=2.0, ignore_eos=True, top_logprobs=3, seed=1)
    (choice,) = await complete(rig.engine, PROMPT, sampling)
    plain = plain_logprobs(rig.models[0], PROMPT, choice.token_ids)
    for position, tops in enumerate(choice.tops):
        assert [token for token, _ in tops] == plain[position].topk(3).indices.tolist()


async def test_logprobs_are_raw_whatever_the_truncation(rig: Rig) -> None:
    sampling = Sampling(30, temperature=1.5, top_k=3, top_p=0.9, ignore_eos=True)
    (choice,) = await complete(rig.engine, PROMPT, sampling)
    assert max(differences(rig.models[0], PROMPT, choice.token_ids, choice.logprobs)) < EXACT
    plain = plain_logprobs(rig.models[0], PROMPT, choice.token_ids)
    assert all(token in plain[i].topk(3).indices.tolist() for i, token in enumerate(choice.token_ids))


async def test_nucleus_keeps_the_smallest_set(rig: Rig) -> None:
    (choice,) = await complete(rig.engine, PROMPT, Sampling(30, top_p=1e-6, ignore_eos=True))
    plain = plain_logprobs(rig.models[0], PROMPT, choice.token_ids)
    assert choice.token_ids == plain.argmax(-1).tolist()


async def test_a_bias_and_penalties_change_what_is_drawn_and_no_logprob(rig: Rig) -> None:
    additive = Sampling(24, temperature=0, ignore_eos=True, presence_penalty=1.5, frequency_penalty=0.5)
    biased = replace(additive, logit_bias=((7, 9.0), (9, -50.0)))
    (choice,) = await complete(rig.engine, PROMPT, biased)
    assert max(differences(rig.models[0], PROMPT, choice.token_ids, choice.logprobs)) < EXACT
    plain = plain_logprobs(rig.models[0], PROMPT, choice.token_ids)
    for position, token in enumerate(choice.token_ids):
        scores = plain[position].clone()
        scores[7] += 9.0
        scores[9] -= 50.0
        for seen in choice.token_ids[:position]:
            scores[seen] -= 0.5
        for seen in set(choice.token_ids[:position]):
            scores[seen] -= 1.5
        assert scores.max() - scores[token] < EXACT
    assert choice.token_ids != plain.argmax(-1).tolist()


async def test_a_repetition_penalty_counts_the_prompt(rig: Rig) -> None:
    (free,) = await complete(rig.engine, PROMPT, Sampling(1, temperature=0, ignore_eos=True))
    prompt = [*PROMPT, *free.token_ids]
    told = Sampling(1, temperature=0, ignore_eos=True, logit_bias=((free.token_ids[0], 50.0),))
    assert (await complete(rig.engine, prompt, told))[0].token_ids == free.token_ids
    strong = replace(told, repetition_penalty=0.01)
    other = replace(strong, logit_bias=((free.token_ids[0], 50.0), (501, 51.0)))
    assert (await complete(rig.engine, prompt, other))[0].token_ids == free.token_ids
    assert (await complete(rig.engine, prompt, replace(other, repetition_penalty=1.0)))[0].token_ids == [501]


async def test_the_highest_min_p_takes_the_most_likely(rig: Rig) -> None:
    (choice,) = await complete(rig.engine, PROMPT, Sampling(12, min_p=1.0, ignore_eos=True))
    plain = plain_logprobs(rig.models[0], PROMPT, choice.token_ids)
    assert choice.token_ids == plain.argmax(-1).tolist()
    assert max(differences(rig.models[0], PROMPT, choice.token_ids, choice.logprobs)) < EXACT


async def test_stop_ids_end_a_choice_and_stay_in_it(rig: Rig) -> None:
    (free,) = await complete(rig.engine, PROMPT, Sampling(20, temperature=0, ignore_eos=True))
    stop = free.token_ids[7]
    first = free.token_ids.index(stop)
    (choice,) = await complete(rig.engine, PROMPT, Sampling(20, temperature=0, ignore_eos=True, stop_ids=(stop,)))
    assert choice.token_ids == free.token_ids[: first + 1]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert len(choice.logprobs) == first + 1


async def test_stop_strings_end_a_choice_and_their_tokens_stay_in_it(rig: Rig) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(rig.models[0])
    (free,) = await complete(rig.engine, PROMPT, Sampling(60, seed=3, ignore_eos=True))
    texts = [tokenizer.decode(free.token_ids[: end + 1]) for end in range(60)]
    stop = next(t for t in (tokenizer.decode([token]) for token in free.token_ids[5:]) if t.isascii() and t.isalnum())
    first = next(end for end, text in enumerate(texts) if stop in text)
    (choice,) = await complete(rig.engine, PROMPT, Sampling(60, seed=3, ignore_eos=True, stop=(stop,)))
    assert choice.token_ids == free.token_ids[: first + 1]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)


async def test_the_end_token_ends_a_choice_and_stays_in_it(rig: Rig) -> None:
    prompt = ending_prompt(rig.models[0], EOS)
    (ended,) = await complete(rig.engine, prompt, Sampling(20, temperature=0))
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == ([EOS], "stop", None)
    (further,) = await complete(rig.engine, prompt, Sampling(20, temperature=0, ignore_eos=True))
    assert (further.token_ids[0], len(further.token_ids), further.finish_reason) == (EOS, 20, "length")


async def test_a_seed_repeats_itself_whoever_shares_the_batch(rig: Rig) -> None:
    (alone,) = await complete(rig.engine, PROMPT, Sampling(20, seed=11, ignore_eos=True))
    crowd = await asyncio.gather(
        *(complete(rig.engine, PROMPT, Sampling(20, ignore_eos=True), request_id=f"c{i}") for i in range(6)),
        complete(rig.engine, PROMPT, Sampling(20, seed=11, ignore_eos=True), request_id="again"),
    )
    assert crowd[-1][0].token_ids == alone.token_ids
    assert len({tuple(choice.token_ids) for (choice,) in crowd}) > 1


@pytest.mark.parametrize("prompt", [[], [VOCAB], [-1], [5] * 1100], ids=["empty", "foreign", "negative", "too long"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_bad_prompt_is_refused(rig: Rig, prompt: list[int], stream: bool) -> None:
    with pytest.raises(EngineRejected) as caught:
        await complete(rig.engine, prompt, Sampling(4), stream=stream)
    assert caught.value.status == 400


async def test_the_context_bounds_the_output(rig: Rig) -> None:
    (choice,) = await complete(rig.engine, [5] * 500, Sampling(5000, ignore_eos=True))
    assert choice.finish_reason == "length"
    assert len(choice.token_ids) in (12, 524)  # contexts of 512 and 1024


async def test_a_swap_splits_the_spans_and_the_logprobs(rig: Rig) -> None:
    """In mid-generation: tokens before belong to the old weights, those after to the new, keys computed anew."""
    for version in range(6):  # on a busy machine a reply may end before the pause
        request = rig.engine.generate(PROMPT, Sampling(450, ignore_eos=True, n=2), request_id=f"r{version}")
        new_model = rig.models[(version + 1) % 2]
        async with aclosing(request) as chunks:
            parts = [await _begin(rig, chunks)]
            await rig.control.load(new_model)
            await rig.control.set_version(f"policy@{version + 1}")
            assert await rig.control.reset_prefix_cache()
            await rig.control.resume()
            parts += await _drain(chunks)
        replies = [join([part for part in parts if part.index == index]) for index in range(2)]
        if all(len(reply.spans) > 1 for reply in replies):
            break
    for whole in replies:
        (old, start, cut), (new, also_cut, end) = whole.spans
        assert (old, start, new, also_cut, end) == (f"policy@{version}", 0, f"policy@{version + 1}", cut, 450)
        assert 0 < cut < 450
        before = differences(rig.models[version % 2], PROMPT, whole.token_ids, whole.logprobs)
        after = differences(new_model, PROMPT, whole.token_ids, whole.logprobs)
        assert max(before[:cut]) < EXACT
        assert max(after[cut:]) < EXACT
        assert max(before[cut:]) > 0.1
        assert token_versions(whole.spans, 450, "policy").tolist() == [version] * cut + [version + 1] * (450 - cut)
    assert await rig.engine.weight_version() == f"policy@{version + 1}"
    (fresh,) = await complete(rig.engine, PROMPT, Sampling(20, ignore_eos=True))
    assert max(differences(new_model, PROMPT, fresh.token_ids, fresh.logprobs)) < EXACT


async def test_a_shared_prefix_is_not_taken_from_old_weights(rig: Rig) -> None:
    prompt = [(7 * i) % 300 + 3 for i in range(300)]
    await complete(rig.engine, prompt, Sampling(4, temperature=0, ignore_eos=True))
    await rig.control.pause("keep")
    await rig.control.load(rig.models[1])
    assert await rig.control.reset_prefix_cache()
    await rig.control.resume()
    (choice,) = await complete(rig.engine, prompt, Sampling(4, temperature=0, ignore_eos=True))
    assert max(differences(rig.models[1], prompt, choice.token_ids, choice.logprobs)) < EXACT


async def test_a_failed_load_followed_by_a_good_one_serves_right(rig: Rig) -> None:
    await rig.control.pause("keep")
    with pytest.raises(EngineError):
        await rig.control.load(rig.models[0].parent / "vanished")
    await rig.control.load(rig.models[1])
    assert await rig.control.reset_prefix_cache()
    await rig.control.resume()
    (choice,) = await complete(rig.engine, PROMPT, Sampling(30, ignore_eos=True))
    assert max(differences(rig.models[1], PROMPT, choice.token_ids, choice.logprobs)) < EXACT


async def test_pausing_with_abort_returns_what_there_is(rig: Rig) -> None:
    for number in range(6):  # on a busy machine a reply may end before the pause
        generated = rig.engine.generate(PROMPT, Sampling(450, ignore_eos=True), request_id=f"r{number}")
        async with aclosing(generated) as chunks:
            parts = [await _begin(rig, chunks)]
            await rig.control.resume()
            await rig.control.pause("abort")
            parts += await _drain(chunks)
            await rig.control.resume()
        whole = join(parts)
        if whole.finish_reason == "abort":
            break
    assert whole.finish_reason == "abort"
    assert 1 <= len(whole.token_ids) < 450
    assert whole.spans[-1].end == len(whole.token_ids)


async def test_pausing_with_wait_finishes_what_runs(rig: Rig) -> None:
    running = rig.engine.generate(PROMPT, Sampling(60, ignore_eos=True), request_id="r")
    first = await anext(running)
    rest = asyncio.ensure_future(_drain(running))
    await rig.control.pause("wait")
    await rig.control.load(rig.models[1])
    await rig.control.set_version("policy@1")
    await rig.control.resume()
    whole = join([first, *await rest])
    assert whole.spans == (LabelSpan("policy@0", 0, 60),)


async def test_requests_wait_while_paused(rig: Rig) -> None:
    await rig.control.pause("keep")
    waiting = asyncio.ensure_future(complete(rig.engine, PROMPT, Sampling(4, ignore_eos=True)))
    done, _ = await asyncio.wait((waiting,), timeout=0.3)
    assert not done
    assert (await rig.control.state()).paused
    await rig.control.set_version("policy@5")
    await rig.control.resume()
    (choice,) = await waiting
    assert choice.spans == (LabelSpan("policy@5", 0, 4),)
    assert not (await rig.control.state()).paused


async def test_leaving_early_frees_the_request(rig: Rig) -> None:
    async with aclosing(rig.engine.generate(PROMPT, Sampling(400, n=4, ignore_eos=True), request_id="left")) as chunks:
        await anext(chunks)

    async def idle() -> bool:
        return await rig.control.abort() == 0

    await until(idle)


async def test_health_and_label(rig: Rig) -> None:
    assert await rig.engine.health()
    assert await rig.engine.weight_version() == "policy@0"
    state = await rig.control.state()
    assert (state.label, state.paused) == ("policy@0", False)


async def _drain(chunks: AsyncIterable[Chunk]) -> list[Chunk]:
    return [chunk async for chunk in chunks]


async def _begin(rig: Rig, chunks: AsyncIterator[Chunk]) -> Chunk:
    """The first chunk of a reply, with the engine paused behind it: few tokens are let through until it has come."""
    await rig.control.pause("keep")
    first = asyncio.ensure_future(anext(chunks))
    async with asyncio.timeout(120):
        while not first.done():
            await rig.control.resume()
            await rig.control.pause("keep")
            await asyncio.wait([first], timeout=1)
    return await first
