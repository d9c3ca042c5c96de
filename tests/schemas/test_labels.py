"""Labels of weight versions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.schemas.labels import LOADING, make_label, parse_label


@given(st.text(min_size=1).filter(lambda name: "\n" not in name), st.integers(0, 2**40))
def test_a_label_reads_back(policy: str, version: int) -> None:
    assert parse_label(make_label(policy, version)) == (policy, version)


@pytest.mark.parametrize("label", ["default", LOADING, "", "p", "p@", "@3", "p@-1", "p@01", "p@1x", "p@1\n"])
def test_anything_else_names_no_version(label: str) -> None:
    assert parse_label(label) is None


def test_versions_begin_at_0() -> None:
    with pytest.raises(ValueError, match="0 or above"):
        make_label("p", -1)
