"""How often a call is sent, and to whom: a pure decision, whatever upstreams answer. And what it costs."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from millrace.producers.gateway.prices import MILLION, Prices, cost
from millrace.producers.gateway.upstreams.attempts import LONGEST_S, PASSING, AttemptFailure, Retry, after, retry_after

failures = st.builds(
    AttemptFailure,
    st.none() | st.sampled_from(sorted(PASSING | {400, 401, 404, 422})),
    st.none() | st.floats(0, 100),
    st.booleans(),
)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=3), st.lists(failures, min_size=20, max_size=20))
def test_everybody_is_asked_at_most_as_often_as_said(retries: Sequence[int], failed: Sequence[AttemptFailure]) -> None:
    asked, at, tried = [0] * len(retries), 0, 0
    for failure in failed:
        asked[at], tried = asked[at] + 1, tried + 1
        then = after(failure, tried, retries[at], behind=at + 1 < len(retries))
        if then == "end":
            break
        assert failure.status is None or failure.status in PASSING
        if isinstance(then, Retry):
            assert not failure.is_silent
            assert 0 <= then.wait_s <= LONGEST_S
            assert failure.wait_s is None or then.wait_s == failure.wait_s
        else:
            at, tried = at + 1, 0
    else:
        raise AssertionError("it never ends")
    assert all(count <= most + 1 for count, most in zip(asked, retries, strict=True))


def test_waits_grow_and_what_is_asked_for_counts() -> None:
    busy = AttemptFailure(429)
    waits = [after(busy, tried, 9, behind=False) for tried in range(1, 9)]
    assert waits == [Retry(wait) for wait in (0.5, 1, 2, 4, 8, 16, 20, 20)]
    assert after(AttemptFailure(429, 3.0), 1, 1, behind=True) == Retry(3.0)
    assert after(AttemptFailure(429, 60.0), 1, 1, behind=True) == "fallback"
    assert after(AttemptFailure(429, 60.0), 1, 1, behind=False) == "end"
    assert after(AttemptFailure(None, is_silent=True), 1, 1, behind=True) == "fallback"
    assert after(AttemptFailure(400), 1, 9, behind=True) == "end"


@given(st.none() | st.text(max_size=12))
def test_a_date_or_nonsense_asks_for_nothing(text: str | None) -> None:
    found = retry_after(text)
    assert found is None or found == float(text or "")
    assert retry_after("7") == 7.0


prices = st.floats(0, 1000)
counts = st.integers(0, 10**9)


@given(st.builds(Prices, prices, prices, prices), counts, counts, counts)
def test_a_cost_is_the_sum_of_its_tokens(told: Prices, fresh: int, cached: int, completion: int) -> None:
    found = cost(told, (fresh + cached, completion, cached))
    if not (fresh or cached or completion):
        assert found is None
        return
    by_hand = (fresh * told.prompt + cached * told.cached_prompt + completion * told.completion) / MILLION
    assert found is not None
    assert abs(found - by_hand) <= 1e-9 * max(1.0, by_hand)
    assert cost(None, (fresh + cached, completion, cached)) is None
    assert cost(told, (cached, 0, cached + 5)) == cost(told, (cached, 0, cached))
