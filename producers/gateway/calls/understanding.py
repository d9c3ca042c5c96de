"""What a request says, whoever sent it: its body read in its dialect, and what any later one is compared with.

Invariants: it changes no session, so that it may run beside the loop; what it returns is whole in itself, whatever
earlier responses the request named; in every dialect a body that was made whole, and the bytes of a body times the
choices that it asks for, stay within `max_body_bytes`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from millrace.dialects import match_keys
from millrace.dialects.base import Dialect
from millrace.dialects.conversation import Ask, check_strict, messages_of, prompt_message, unknown_fields
from millrace.dialects.errors import bad_request
from millrace.dialects.rendering.base import Message, Options
from millrace.dialects.stored_responses import Recalled, StoredResponse
from millrace.dialects.template_options import template_options
from millrace.producers.gateway.calls.sampling import too_long
from millrace.producers.gateway.options import GatewayOptions
from millrace.schemas.requests import RequestOutline, outlined


class Understood(NamedTuple):
    """A request: its messages as templates want them, and the digests that say what it continues or repeats."""

    request: Ask
    messages: list[Message]
    digests: list[bytes]
    hash: bytes
    body: bytes
    """whole in itself"""
    used: Sequence[StoredResponse]
    """the responses that it named"""
    options: Options
    """what it says to the chat template"""
    outline: RequestOutline | None
    """where its parts stand in the body"""


def understand(dialect: Dialect, body: bytes, recalled: Recalled, options: GatewayOptions) -> Understood:
    """What a request says in its dialect. Raises ApiError.

    recalled: the earlier responses that it may name, by what it says of its end user."""
    received = body
    request, body, used = dialect.understand(body, recalled)
    if options.strict:
        check_strict(request, unknown_fields(request, received), dialect.unknown)
    if request.n * len(body) > options.max_body_bytes:
        most = options.max_body_bytes // len(body)
        raise bad_request(f"n: a request of {len(body)} bytes may ask for at most {most} choices", param="n")
    if used and len(body) > options.max_body_bytes:
        raise too_long(request.asked_in)
    messages = messages_of(request.turns) if request.prompt is None else [prompt_message(request.prompt)]
    digests = match_keys.chain(messages, request.tools)
    hash, said = match_keys.request_hash(body), template_options(body)
    return Understood(request, messages, digests, hash, body, used, said, outlined(body))
