"""Pages of what a response was asked with: every item once, in either order, however long the pages are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.dialects.errors import ApiError
from millrace.dialects.responses.items import page, with_ids

ids = st.none() | st.sampled_from(("a", "b", "msg_r_in1", "msg_r_in1_", ""))
items = st.lists(
    st.fixed_dictionaries(
        {"id": ids, "role": st.sampled_from(("user", "assistant")), "content": st.text(max_size=3)},
        optional={"type": st.sampled_from(("message", "function_call", "odd", None))},
    ),
    max_size=12,
)


@given(items, st.integers(1, 100), st.sampled_from(("asc", "desc", None)))
def test_whoever_turns_the_pages_gets_every_item_once(given: list[Any], limit: int, order: str | None) -> None:
    whole = with_ids(given, "resp_r")
    assert len({item["id"] for item in whole}) == len(given)
    got: list[Any] = []
    query = {"limit": str(limit), **({"order": order} if order else {})}
    while True:
        found = page(given, "resp_r", query)
        data = found["data"]
        assert len(data) <= limit
        assert (found["first_id"], found["last_id"]) == ((data[0]["id"], data[-1]["id"]) if data else (None, None))
        got += data
        if not found["has_more"]:
            break
        query["after"] = found["last_id"]
    assert (got if order == "asc" else got[::-1]) == whole
    for item, one in zip(given, whole, strict=True):
        assert one["role"] == item["role"]
        text = one["content"] if one["type"] != "message" else one["content"][0]["text"]
        assert text == item["content"]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "101"}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"limit": "-1"}, "limit"),
        ({"limit": "9" * 400}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "nobody"}, "after"),
    ],
)
def test_what_is_no_page_is_refused_by_its_field(query: dict[str, str], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        page([{"role": "user", "content": "hi"}], "resp_r", query)
    assert (refused.value.status, refused.value.param) == (400, param)
