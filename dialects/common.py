"""What several APIs do alike: how a request is decoded, and how the older ones of OpenAI count and end."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from millrace.dialects import shape
from millrace.dialects.base import StreamEvent
from millrace.dialects.errors import bad_request
from millrace.dialects.reading import events
from millrace.dialects.writable import WritableCall
from millrace.schemas.json_values import JsonObject

T = TypeVar("T")

DONE = StreamEvent("", events.END_MARK)
"""the last event of a stream"""


def decode_request(decoder: msgspec.json.Decoder[T], body: bytes, *, with_path: bool = True) -> T:
    """The body of a request. Raises ApiError 400 for what is no JSON, or has wrong types; `with_path`: the error begins
    with the place of the wrong value."""
    shape.check(body)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        place = path.strip("`.")
        raise bad_request(f"{place}: {message}" if place and with_path else message, param=place or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise shape.json_refusal(body, error) from None


def usage_of(call: WritableCall) -> JsonObject:
    """Token counts of a call as chat completions and completions report them."""
    prompt, completion = call.prompt_tokens, call.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": call.cached},
    }
