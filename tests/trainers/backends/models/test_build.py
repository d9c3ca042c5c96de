from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from millrace.trainers.backends.models.build import SCORE, build, with_scalar_head
from millrace.trainers.backends.models.forward import ForwardPass
from millrace.trainers.batches.packing import pack
from millrace.trainers.weights import checkpoint
from millrace.trainers.weights.state import State
from tests.support.samples import random_samples, small_state


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_a_value_model_starts_from_the_policy_and_says_zero(kind: str) -> None:
    policy = small_state(kind)
    value = with_scalar_head(policy)
    assert value.weights.keys() == policy.weights.keys() - {"lm_head.weight"} | {SCORE}
    batch = pack(random_samples(0))
    values = ForwardPass(build(value.assets, value.weights), batch).values()
    assert values.shape == (batch.length,)
    assert not values.any()


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_serves_a_reward_model_as_it_was_trained(tmp_path: Path, tied: bool) -> None:
    """The score of a sample is what the exported directory's own class says at its last token."""
    made = with_scalar_head(small_state(tie_word_embeddings=tied))
    generator = torch.Generator().manual_seed(0)
    weights = {**made.weights, SCORE: torch.randn(made.weights[SCORE].shape, generator=generator)}
    checkpoint.export(tmp_path, State(weights, made.assets))
    served = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    samples = random_samples(0)
    batch = pack(samples)
    adopted = checkpoint.adopt(tmp_path)
    ours = ForwardPass(build(adopted.assets, adopted.weights), batch).values()[batch.ends]
    served.config.pad_token_id = -1
    with torch.no_grad():
        theirs = [served(torch.from_numpy(m.tokens.astype("int64"))[None]).logits.item() for m in batch.members]
    assert ours.tolist() == pytest.approx(theirs, abs=3e-6)
