"""Whatever an API's own client can send is read for the log, although no engine of ours could answer it; and what an
engine can answer is read as it was asked."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from anthropic.types import MessageParam, ToolUnionParam
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolUnionParam
from openai.types.responses import ResponseInputItemParam, ToolParam

from millrace.dialects import match_keys
from millrace.dialects.conversation import messages_of
from millrace.dialects.errors import ApiError
from tests.support.typed import values
from tests.support.upstream_answers import READERS

TYPES = {
    "chat": ("messages", ChatCompletionMessageParam, ChatCompletionToolUnionParam),
    "messages": ("messages", MessageParam, ToolUnionParam),
    "responses": ("input", ResponseInputItemParam, ToolParam),
}


@pytest.mark.parametrize("api", TYPES)
def test_every_request_of_the_client_is_read(api: str) -> None:
    field, item, tool = TYPES[api]

    @settings(
        max_examples=40,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(st.lists(values(item), min_size=1, max_size=3), st.lists(values(tool), max_size=2))
    def read(items: list[Any], tools: list[Any]) -> None:
        body = orjson.dumps({"model": "m", "max_tokens": 1, field: items, "tools": tools})
        asked = READERS[api].read_request(body)
        assert len(asked.digests) == len(asked.messages) + 1
        try:
            ask = READERS[api].dialect.parse(body)
            messages = messages_of(ask.turns)
        except ApiError:
            return
        assert asked[:2] == (messages, match_keys.chain(messages, ask.tools))

    read()
