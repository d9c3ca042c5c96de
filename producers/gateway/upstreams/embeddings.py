"""What embeddings are to the gateway: requests that pass to an upstream and back byte for byte, and count for a key.

Invariant: an answer is looked into for its usage alone, and nothing that it holds raises an error."""

from __future__ import annotations

from typing import Any

import msgspec

from millrace.dialects.answers import mapping, number
from millrace.dialects.errors import ApiError

NAME = "embeddings"
"""in `speaks` of an upstream, and as the name of the route"""
PATH = "/embeddings"
"""below an upstream's base url, and below /v1 here"""


class _AnswerUsage(msgspec.Struct):
    usage: Any = None


_usage_decoder = msgspec.json.Decoder(_AnswerUsage)


def usage(answer: bytes) -> tuple[int, int, int]:
    """Tokens as the upstream counted them (prompt, completion, cached); zeros where it did not."""
    try:
        fields = _usage_decoder.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return 0, 0, 0
    return number(mapping(fields.usage).get("prompt_tokens")), 0, 0


def refusal() -> ApiError:
    """What a request for the engines is answered."""
    message = (
        "The engines of this gateway make no embeddings: ask for a model that one of [[gateway.routes]] sends to an "
        'upstream with "embeddings" in what it speaks'
    )
    return ApiError(404, message, param="model", code="model_not_found")
