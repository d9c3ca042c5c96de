"""Messages as chat templates expect them: arguments of tool calls as objects, unless they nest deeper or hold
more than a template may walk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from millrace.producers.gateway.rendering.base import Message
from millrace.producers.gateway.shape import unwieldy


def decoded(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages with tool arguments as objects; text that is no JSON, or too deep or too much, stays text."""
    return [
        {**message, "tool_calls": [_call(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else dict(message)
        for message in messages
    ]


def _call(call: Any) -> Any:
    function = call["function"]
    arguments = function["arguments"]
    if not unwieldy(arguments):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = function["arguments"]
    return {**call, "function": {**function, "arguments": arguments}}
