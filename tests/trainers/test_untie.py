from __future__ import annotations

import json

import torch

from millrace.trainers.backends.forward import ForwardPass
from millrace.trainers.backends.models import build
from millrace.trainers.batches.packing import pack
from millrace.trainers.untie import HEAD, untied
from tests.support.samples import random_samples, small_state


def test_an_untied_model_says_what_it_said() -> None:
    tied = small_state(tie_word_embeddings=True)
    assert HEAD not in tied.weights
    made = untied(tied)
    assert json.loads(made.assets["config.json"])["tie_word_embeddings"] is False
    batch = pack(random_samples(0))
    one, two = (ForwardPass(build(s.assets, s.weights), batch).tokens(1.0)[0] for s in (tied, made))
    assert torch.equal(one, two)
    assert untied(made) is made
