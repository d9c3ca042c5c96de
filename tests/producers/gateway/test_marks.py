"""Ids say which process minted them, and look and sort as ids without a mark."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from millrace.producers.gateway.marks import MOST, UUID7, index_of, marked_id, minted_call
from millrace.schemas.ids import new_id

indexes = st.integers(0, MOST - 1)


@given(indexes)
def test_the_index_is_read_from_wherever_the_id_stands(index: int) -> None:
    id, call = marked_id(index), minted_call(index)
    for text in (id, f"resp_{id}", f"msg_{id}_0", f"mr-{id}.{os.urandom(16).hex()}", call, f"fc_{call[5:]}"):
        assert index_of(text) == index, text


def test_marked_ids_are_uuids_of_the_same_kind_sort_as_they_were_made_and_differ() -> None:
    made = [marked_id(at % 3) for at in range(20_000)]
    assert all(UUID7.fullmatch(id) for id in made)
    assert made == sorted(made)
    assert len(set(made)) == len(made)


def test_an_id_without_a_mark_is_hardly_ever_taken_for_one() -> None:
    assert sum(index_of(new_id()) is not None for _ in range(20_000)) < 5
    assert sum(index_of(f"call_{os.urandom(12).hex()}") is not None for _ in range(20_000)) < 5


@given(st.text())
def test_any_text_may_be_asked(text: str) -> None:
    assert index_of(text) is None or UUID7.search(text) or "_" in text
