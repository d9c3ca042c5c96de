"""How an engine is to sample: log-probabilities bound what is sampled where a request does not say how much."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.dialects.conversation import Ask
from millrace.dialects.errors import ApiError
from millrace.producers.gateway.calls.sampling import to_sampling
from millrace.schemas import bounds


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


@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k", "top_logprobs", "presence_penalty", "min_p"])
def test_a_value_that_no_engine_takes_is_refused_by_its_name(field: str) -> None:
    ask = Ask(model="m", turns=[])
    setattr(ask, field, -99)
    with pytest.raises(ApiError) as refused:
        to_sampling(ask, {}, 100)
    assert (refused.value.status, refused.value.param) == (400, field)
