"""Whatever an address is, an API that can say it says it as it was, and nothing that a client sends raises anything but
a refusal."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.dialects.conversation import Media
from millrace.dialects.errors import ApiError
from millrace.dialects.media import Address, data_url, of_chat, of_messages, of_responses
from millrace.dialects.translation.media import to_chat, to_messages, to_responses

Read, Write = Callable[[Mapping[str, Any]], Address], Callable[[Media], dict[str, Any]]
APIS: dict[str, tuple[Read, Write]] = {
    "chat": (of_chat, to_chat),
    "responses": (of_responses, to_responses),
    "messages": (of_messages, to_messages),
}
types = st.sampled_from(["image/png", "application/pdf", "text/plain", "text/csv", "audio/wav"])
urls = st.builds(lambda type, data: data_url(type, base64.b64encode(data).decode()), types, st.binary(min_size=1))
addresses = st.builds(Address, urls | st.just("https://far.test/x") | st.text(), st.text(max_size=9))
VALUES = st.none() | st.booleans() | st.integers() | st.text() | st.just("base64") | urls
KEYS = st.sampled_from(
    [
        "image_url",
        "url",
        "file",
        "file_data",
        "filename",
        "file_url",
        "input_audio",
        "data",
        "format",
        "source",
        "type",
        "media_type",
        "title",
    ]
)
ODD = st.recursive(VALUES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=4))


def written(write: Write, kind: Any, address: Address) -> dict[str, Any] | None:
    """How an API says it; None where it refuses it."""
    with suppress(ApiError):
        return write(Media(kind, kind, "messages", address))
    return None


@pytest.mark.parametrize("api", APIS)
@given(kind=st.sampled_from(["image", "file", "audio", "unknown"]), address=addresses)
def test_what_is_said_is_where_it_was(api: str, kind: Any, address: Address) -> None:
    read, write = APIS[api]
    said = written(write, kind, address)
    assert said is None or read(said).url == address.url


@pytest.mark.parametrize("api", APIS)
@given(part=st.dictionaries(KEYS, ODD, max_size=4))
def test_no_part_raises(api: str, part: dict[str, Any]) -> None:
    found = APIS[api][0](part)
    assert all(isinstance(one, str) for one in found)
    for _, write in APIS.values():
        for kind in ("image", "file", "audio"):
            written(write, kind, found)
