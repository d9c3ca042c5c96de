from __future__ import annotations

from pathlib import Path

import pytest
import torch
from jinja2 import TemplateError

from benchmarks.rl_in_process import rehearse
from millrace.apps.demo import tiny
from millrace.trainers.algorithms.registry import policy
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.batches.packing import pack
from millrace.trainers.learning import Schedule
from millrace.trainers.sampling import sample
from millrace.trainers.weights import checkpoint


@pytest.fixture(scope="module")
def backend() -> TorchBackend:
    made = TorchBackend(device="cpu")
    made.form(0, 1, None, 30.0)
    made.load(tiny.random_state(0))
    return made


def test_the_model_is_the_measured_one() -> None:
    assert sum(weight.numel() for weight in tiny.random_state(0).weights.values()) == 228_384


def test_a_chat_reads_as_the_warm_start_did() -> None:
    tokenizer = tiny.tokenizer()
    chat = [{"role": "user", "content": "352041"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<bos>s352041="
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) == tiny.encode("352041")
    whole = [*chat, {"role": "assistant", "content": "012345"}]
    ids = tokenizer.apply_chat_template(whole, return_dict=False)
    assert ids == [*tiny.encode("352041"), *range(3, 9), tiny.EOS]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "s352041=012345"
    with pytest.raises(TemplateError, match="user and assistant"):
        tokenizer.apply_chat_template([{"role": "system", "content": "1"}])


def test_every_id_decodes_and_only_digits_can_be_right() -> None:
    tokenizer = tiny.tokenizer()
    assert len(tokenizer) == tiny.VOCABULARY
    for token in range(tiny.VOCABULARY):
        assert tokenizer.decode([token])
    assert tiny.decode([3, 12, tiny.EOS]) == "09"
    assert tiny.decode([3, 31, tiny.PAD]) == "0??"
    assert tokenizer("s7Z=").input_ids == [22, 10, 23, 14]


def test_sampled_logprobs_are_what_training_computes(backend: TorchBackend) -> None:
    """So the first step's ratios are 1: generation with a cache and packed scoring are one policy."""
    prompts = [tiny.encode("352041"), tiny.encode("111111"), [1, 5, 6]]
    generator = torch.Generator().manual_seed(0)
    replies = sample(backend.model, prompts, n=4, max_tokens=7, end=tiny.EOS, generator=generator, temperature=0.8)
    assert [r.prompt for r in replies] == [0] * 4 + [1] * 4 + [2] * 4
    samples = [
        tiny.to_sample(prompts[r.prompt], r.tokens, r.logprobs, reward=0.0, seq=r.prompt, name=str(i), version=0)
        for i, r in enumerate(replies)
    ]
    batch = pack(samples)
    torch.testing.assert_close(backend.score([batch], 0.8)[0], batch.behaviour, rtol=0, atol=3e-6)
    for reply in replies:
        assert reply.finished == (reply.tokens[-1] == tiny.EOS)
        assert reply.finished or len(reply.tokens) == 7
        assert tiny.EOS not in reply.tokens[:-1]


def test_greedy_repeats_and_training_mode_is_left_as_it_was(backend: TorchBackend) -> None:
    first, second = (
        sample(backend.model, [tiny.encode("352041")], max_tokens=7, end=tiny.EOS, generator=None) for _ in range(2)
    )
    assert first == second
    assert backend.model.training


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_warm_start_then_grpo_learns(tmp_path: Path) -> None:
    """The proof of `benchmarks.rl_in_process` at CI size: 25 steps raise sampled reward by at least 0.15."""
    warm = tiny.make_sort_policy(tmp_path / "policy", seed=0)
    assert 0.3 <= warm.accuracy < 0.6
    result = rehearse(checkpoint.adopt(tmp_path / "policy"), policy("grpo"), Schedule(3e-4, warmup=10), steps=25)
    assert sum(result.rewards[-5:]) / 5 - sum(result.rewards[:3]) / 3 >= 0.15
