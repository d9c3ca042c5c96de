"""Which versions are trained again, from where, and what is refused. Pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.consumers.replay.prove.plan import number_range, plan, provable, spans
from millrace.infra.errors import ConfigError, ProofError

NUMBERS = st.integers(1, 30)


def test_what_can_be_asked() -> None:
    assert number_range("12", 20) == (12, 12)
    assert number_range("10..20", 20) == (10, 20)
    assert number_range("all", 20) == (1, 20)


@pytest.mark.parametrize("text", ["", "x", "1-2", "..3", "3..", "-1", "1..2..3", "20..10", "٣"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises((ConfigError, ProofError)):
        number_range(text, 20)


@pytest.mark.parametrize(("text", "says"), [("0", "given, not trained"), ("21", "newest is 20"), ("15..21", "newest")])
def test_versions_that_were_never_trained_are_refused(text: str, says: str) -> None:
    with pytest.raises(ProofError, match=says):
        number_range(text, 20)
    with pytest.raises(ProofError, match="no version was trained yet"):
        number_range("all", 0)


def test_it_begins_at_the_nearest_version_that_is_kept() -> None:
    it = plan(10, 20, 60, {0, 7, 9, 58}, set())
    assert (it.start, list(it.steps), list(it.on_the_way)) == (9, list(range(10, 21)), [])
    it = plan(10, 12, 60, {0, 7}, set())
    assert (it.start, list(it.on_the_way)) == (7, [8, 9])


def test_what_retention_took_is_refused_with_what_is_left() -> None:
    gone = set(range(1, 31))
    with pytest.raises(ProofError) as refused:
        plan(10, 20, 60, {0, 30, 58}, gone)
    assert "samples of version 1 are gone" in str(refused.value)
    assert "Versions 31..60 can be proven" in str(refused.value)
    with pytest.raises(ProofError, match="No version can be proven"):
        plan(1, 1, 3, {0}, {1, 2, 3})
    with pytest.raises(ProofError, match="no version before 2 has its files"):
        plan(2, 2, 3, {2}, set())


@given(NUMBERS, st.sets(st.integers(0, 30)), st.sets(NUMBERS), st.data())
def test_a_plan_trains_from_kept_bytes_over_steps_whose_samples_are_there(
    newest: int, kept: set[int], gone: set[int], data: st.DataObject
) -> None:
    first = data.draw(st.integers(1, newest))
    last = data.draw(st.integers(first, newest))
    left = provable(newest, kept, gone)
    assert left.isdisjoint(gone)
    try:
        it = plan(first, last, newest, kept, gone)
    except ProofError:
        assert not set(range(first, last + 1)) <= left
        return
    assert it.start in kept
    assert it.steps[-1] == last
    assert not kept & set(it.on_the_way)
    # A version in the middle that is gone can only be passed where the next one's parent is kept.
    assert not set(it.steps) & gone


@given(st.sets(st.integers(0, 40)))
def test_spans_say_every_number_once(numbers: set[int]) -> None:
    back = [
        number
        for part in filter(None, spans(numbers).split(", "))
        for low, _, high in [part.partition("..")]
        for number in range(int(low), int(high or low) + 1)
    ]
    assert back == sorted(numbers)
