"""Messages as chat templates expect them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from producers.gateway.rendering.base import Message


def decoded(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages with tool arguments as objects; text that is no JSON stays text."""
    return [
        {**message, "tool_calls": [_call(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else dict(message)
        for message in messages
    ]


def _call(call: Any) -> Any:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except (TypeError, ValueError):
        arguments = function["arguments"]
    return {**call, "function": {**function, "arguments": arguments}}
