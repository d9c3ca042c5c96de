"""How an engine is to sample: log-probabilities bound what is sampled where a request does not say how much."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from millrace.dialects.all import CHAT, COMPLETIONS
from millrace.dialects.conversation import Ask
from millrace.dialects.errors import ApiError
from millrace.dialects.reading.head import read_head
from millrace.infra.engines.resubmit import seed_after
from millrace.producers.gateway.calls.sampling import record_of, to_sampling
from millrace.producers.gateway.episodes.bodies import SamplingIn
from millrace.schemas import bounds, codec


@given(room=st.integers(1, 2**21), n=st.integers(1, 128), tops=st.integers(0, 19), defaults=st.booleans())
def test_no_request_that_leaves_the_length_open_is_refused_for_its_logprobs(
    room: int, n: int, tops: int, defaults: bool
) -> None:
    ask = Ask(model="m", turns=[], n=n, logprobs=True, top_logprobs=tops)
    given: dict[str, Any] = {"max_tokens": 10} if defaults else {}
    sampling = to_sampling(ask, given, room)
    assert 1 <= sampling.max_tokens <= room
    assert n * sampling.max_tokens * (1 + tops) <= bounds.LOGPROBS
    if n * room * (1 + tops) <= bounds.LOGPROBS and not defaults:
        assert sampling.max_tokens == room


def test_a_length_that_is_asked_for_is_never_cut() -> None:
    ask = Ask(model="m", turns=[], max_tokens=bounds.LOGPROBS, logprobs=True, top_logprobs=1)
    with pytest.raises(ApiError, match="lower max_tokens"):
        to_sampling(ask, {}, bounds.LOGPROBS)


@given(seed=st.integers(-bounds.SEED - 1, bounds.SEED), by=st.integers(0, 2**21))
@example(seed=2**31, by=0)
@example(seed=bounds.SEED, by=1)
@example(seed=-bounds.SEED - 1, by=0)
def test_a_seed_of_64_bits_is_that_of_the_engine_and_of_the_record(seed: int, by: int) -> None:
    body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], "prompt": "x", "seed": seed})
    for dialect in (CHAT, COMPLETIONS):
        sampling = to_sampling(dialect.parse(body), {}, 100)
        assert sampling.seed == seed
        assert codec.decode_by_name("Sampling", codec.encode_by_name("Sampling", record_of(sampling)))["seed"] == seed
    assert read_head(body).sampling()["seed"] == seed
    defaults = msgspec.json.decode(b'{"seed":%d}' % seed, type=SamplingIn).defaults()
    assert to_sampling(Ask(model="m", turns=[]), defaults, 100).seed == seed
    assert -bounds.SEED - 1 <= seed_after(seed, by) <= bounds.SEED
    assert (seed_after(seed, by) - seed - by) % 2**64 == 0


@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k", "top_logprobs", "presence_penalty", "min_p"])
def test_a_value_that_no_engine_takes_is_refused_by_its_name(field: str) -> None:
    ask = Ask(model="m", turns=[])
    setattr(ask, field, -99)
    with pytest.raises(ApiError) as refused:
        to_sampling(ask, {}, 100)
    assert (refused.value.status, refused.value.param) == (400, field)
