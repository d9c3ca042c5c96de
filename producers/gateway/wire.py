"""What clients send: OpenAI's chat request, typed, and what of it this gateway serves.

Policy for fields: what changes sampling in a way that is not served is refused with 400, never ignored; what changes
nothing here (`user`, `metadata`, ...) is accepted and kept with the captured request; an unknown field of the request
is refused as OpenAI does; unknown keys inside messages are ignored, since frameworks add their own.

Invariant: every number, name, list and depth is within `millrace.schemas.bounds` once a request is parsed."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
import orjson

from millrace.infra.engines.base import Sampling
from millrace.producers.gateway import shape
from millrace.producers.gateway.errors import ApiError, bad_request
from millrace.producers.gateway.rendering.base import Message, Tools
from millrace.schemas import bounds

Count = Annotated[int, msgspec.Meta(ge=0, le=bounds.INT)]
Whole = Annotated[int, msgspec.Meta(ge=-bounds.INT, le=bounds.INT)]
Name = Annotated[str, msgspec.Meta(max_length=bounds.NAME_BYTES)]


class FunctionIn(msgspec.Struct):
    """Name and arguments of a call; some clients echo the arguments as an object."""

    name: Name
    arguments: str | dict[str, Any] = ""


class CallIn(msgspec.Struct):
    """A tool call echoed by the client."""

    function: FunctionIn
    id: Name = ""
    type: str = "function"


class MessageIn(msgspec.Struct):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[CallIn] | None = None
    tool_call_id: Name | None = None
    name: Name | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class StreamOptions(msgspec.Struct):
    """Only `include_usage` has an effect."""

    include_usage: bool = False


class ChatRequest(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's chat completion request, with vLLM's `top_k`."""

    model: Name
    messages: list[MessageIn]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Count | None = None
    n: Whole | None = None
    seed: Whole | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    verbosity: str | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings as a tuple."""
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def offered(self) -> Tools:
        """The tools that the template shows, None when there are none."""
        return self.tools or None


class AnyChat(msgspec.Struct):
    """What must be understood of a request that somebody else answers or that was accepted before.

    Numbers have no bounds here: what is beyond them is for the upstream to refuse, and is not recorded."""

    messages: list[MessageIn]
    tools: list[dict[str, Any]] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    user: Any = None
    safety_identifier: Any = None

    def plain(self) -> list[Message]:
        """The messages as match keys want them; parts that are no text are left out."""
        return [to_message(message, at, strict=False) for at, message in enumerate(self.messages)]


_decoder = msgspec.json.Decoder(ChatRequest)
_any_decoder = msgspec.json.Decoder(AnyChat)


def parse_any(body: bytes) -> AnyChat:
    """The little that any chat request must have. Raises ApiError 400."""
    shape.check(body)
    try:
        return _any_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(str(error)) from None


def parse_chat(body: bytes) -> ChatRequest:
    """The request. Raises ApiError 400 for what is no JSON, has wrong types, or asks for what is not served."""
    shape.check(body)
    try:
        request = _decoder.decode(body)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        if "unknown field" in message:
            field = message.rsplit("`", 2)[1]
            raise bad_request(f"Unrecognized request argument supplied: {field}", param=field) from None
        raise bad_request(message, param=path.strip("`.") or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"The body is not valid JSON: {error}") from None
    _check(request)
    return request


def to_sampling(request: ChatRequest, defaults: dict[str, Any], room: int) -> Sampling:
    """How to sample; a session's `defaults` fill what the request leaves open, `room` is what the context has left.

    Raises ApiError 400 when the prompt fills the context, EngineRejected for values no engine takes."""
    if room < 1:
        raise too_long()
    asked = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens

    def pick(value: Any, name: str, default: Any) -> Any:
        return value if value is not None else defaults.get(name, default)

    sampling = Sampling(
        max_tokens=asked if asked is not None else min(int(defaults.get("max_tokens", room)), room),
        temperature=float(pick(request.temperature, "temperature", 1.0)),
        top_p=float(pick(request.top_p, "top_p", 1.0)),
        top_k=int(pick(request.top_k, "top_k", 0)),
        seed=pick(request.seed, "seed", None),
        stop=request.stops,
        n=request.n or 1,
        top_logprobs=request.top_logprobs or 0,
    )
    told = sampling.n * min(sampling.max_tokens, room) * (1 + sampling.top_logprobs)
    if request.logprobs and told > bounds.LOGPROBS:
        raise bad_request(
            f"logprobs: {told} log-probabilities are more than {bounds.LOGPROBS}: lower max_tokens, n or top_logprobs",
            param="logprobs",
        )
    return sampling


def too_long() -> ApiError:
    """The refusal of a prompt that leaves no room for a reply."""
    return bad_request(
        "The conversation is longer than the model's context", param="messages", code="context_length_exceeded"
    )


def to_messages(request: ChatRequest) -> list[Message]:
    """The messages as templates and match keys want them: text content, arguments as text.

    Raises ApiError 400 for content that is no text."""
    return [to_message(message, at) for at, message in enumerate(request.messages)]


def to_message(message: MessageIn, at: int, *, strict: bool = True) -> Message:
    """One message, number `at`. Not `strict`: parts that are no text are left out."""
    out: dict[str, Any] = {"role": message.role, "content": _text(message.content, at, strict)}
    if message.tool_calls:
        out["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": _plain(call)}}
            for call in message.tool_calls
        ]
    for name in ("tool_call_id", "name"):
        if (value := getattr(message, name)) is not None:
            out[name] = value
    if strict:
        _check_names(message, at)
    thoughts = message.reasoning_content or message.reasoning
    if thoughts:
        out["reasoning_content"] = thoughts
    return out


def _check_names(message: MessageIn, at: int) -> None:
    names = [message.tool_call_id, message.name]
    for call in message.tool_calls or ():
        names += [call.id, call.function.name]
    for name in names:
        if name and len(name) > bounds.NAME_BYTES // 4 and len(name.encode()) > bounds.NAME_BYTES:
            raise bad_request(f"A name is longer than {bounds.NAME_BYTES} bytes", param=f"messages[{at}]")


def _plain(call: CallIn) -> str:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        return arguments
    try:
        return orjson.dumps(arguments).decode()
    except TypeError:  # an integer of more than 64 bits
        return json.dumps(arguments, ensure_ascii=False)


def _text(content: str | list[dict[str, Any]] | None, at: int, strict: bool) -> str:
    if isinstance(content, str):
        return content
    parts: list[str] = []
    for part in content or ():
        text = part.get("text")
        if part.get("type") in ("text", "input_text", "output_text") and isinstance(text, str):
            parts.append(text)
        elif strict:
            raise bad_request(
                f"Only text content is supported, not {part.get('type')!r}", param=f"messages[{at}].content"
            )
    return "".join(parts)


def _check(request: ChatRequest) -> None:
    choice = request.tool_choice
    response_type = (request.response_format or {}).get("type", "text")
    refusals: list[tuple[bool, str, str]] = [
        (not request.messages, "messages", "at least one message is needed"),
        (choice not in (None, "auto", "none"), "tool_choice", "only auto and none are supported: calls are not forced"),
        (response_type != "text", "response_format", "only text is supported: outputs are not constrained"),
        (bool(request.frequency_penalty), "frequency_penalty", "penalties are not supported"),
        (bool(request.presence_penalty), "presence_penalty", "penalties are not supported"),
        (bool(request.logit_bias), "logit_bias", "a bias is not supported"),
        (request.n is not None and not 1 <= request.n <= bounds.CHOICES, "n", f"must be 1 to {bounds.CHOICES}"),
        (bool(request.top_logprobs) and not request.logprobs, "top_logprobs", "needs logprobs: true"),
        (
            len(request.stops) > bounds.STOPS or not all(request.stops),
            "stop",
            f"at most {bounds.STOPS} strings, none of them empty",
        ),
        (
            any(len(stop.encode()) > bounds.NAME_BYTES for stop in request.stops),
            "stop",
            f"at most {bounds.NAME_BYTES} bytes each",
        ),
    ]
    for refused, param, why in refusals:
        if refused:
            raise ApiError(400, f"{param}: {why}", param=param, code="unsupported_parameter")
