"""What clients of OpenAI's Responses send, typed, and what of it this gateway serves.

Policy for fields: as `millrace.dialects.chat.request` has it. A request is whole when it comes here:
`millrace.dialects.responses.expand` puts items where it names them. Items of one reply (thoughts,
text, calls) are one turn.

Invariant: every number, name, list and depth is within `millrace.schemas.bounds` once a request is parsed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from millrace.dialects.common import decode_request
from millrace.dialects.conversation import (
    Ask,
    ForcedCalls,
    Kind,
    Media,
    ModelRefusal,
    Part,
    ReplyShape,
    Text,
    Thinking,
    ToolResult,
    ToolUse,
    Turn,
    check_support,
    media,
    schema_of,
    unsupported_error,
)
from millrace.dialects.errors import ApiError, bad_request
from millrace.dialects.media import of_responses
from millrace.dialects.responses.tools import (
    check_name,
    custom_arguments,
    full_name,
    hosted_places,
    inside,
    strict_names,
    tools_of,
)
from millrace.schemas import bounds

Count = Annotated[int, msgspec.Meta(ge=0, le=bounds.INT)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=bounds.INT)]
Name = Annotated[str, msgspec.Meta(max_length=bounds.NAME_BYTES)]
Role = Literal["system", "developer", "user", "assistant"]

MEDIA: dict[Any, Kind] = {
    "input_image": "image", "input_audio": "audio", "input_file": "file",
}  # fmt: skip
ROLES: dict[Any, Role] = {"system": "system", "developer": "developer", "user": "user", "assistant": "assistant"}
TEXTS = ("input_text", "output_text", "text")
REFUSALS = {
    "conversation": "the gateway keeps no conversations: send previous_response_id, or the items whole",
    "background": "a reply is made while its client waits",
    "prompt": "the gateway keeps no prompts",
    "context_management": "nothing is compacted",
    "moderation": "the gateway moderates nothing",
    "image": "only text is made",
    "access_programs": "is not supported",
    "top_logprobs": "log-probabilities are given by chat completions alone",
}
"""fields that are refused where they ask for anything"""


class AnyResponses(msgspec.Struct, kw_only=True):
    """What must be understood of a request that was accepted before."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None


class ResponsesRequest(AnyResponses, kw_only=True):
    """OpenAI's request to create a response, with the `top_k` of open engines."""

    model: Name
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Positive | None = None
    max_tool_calls: Any = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Count | None = None
    top_logprobs: Count | None = None
    text: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: Any = None
    include: list[str] | None = None
    reasoning: dict[str, Any] | None = None
    truncation: str | None = None
    background: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    image: Any = None
    access_programs: Any = None
    metadata: dict[str, Any] | None = None
    client_metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    service_tier: Any = None


_decoder = msgspec.json.Decoder(ResponsesRequest)
_any_decoder = msgspec.json.Decoder(AnyResponses)


def parse_responses(body: bytes) -> ResponsesRequest:
    """The request. Raises ApiError 400 for what is no JSON, or has wrong types."""
    request: ResponsesRequest = decode_request(_decoder, body)
    return request


def parse_any(body: bytes) -> AnyResponses:
    """The little that any request must have. Raises ApiError 400."""
    request: AnyResponses = decode_request(_any_decoder, body)
    return request


def ask_of(request: ResponsesRequest) -> Ask:
    """What a request asks. Raises ApiError 400 for what is not served."""
    _check(request)
    ask = Ask(
        asked_in="input",
        model=request.model,
        turns=turns_of(request),
        tools=tools_of(request.tools),
        strict_tools=strict_names(request.tools),
        choice=_choice(request.tool_choice),
        output=_output(request.text),
        parallel=request.parallel_tool_calls is not False,
        stream=bool(request.stream),
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        users=(request.user, request.safety_identifier),
        given=request,
        inside=inside(request.tools),
        hosted=hosted_places(request.tools),
    )
    if not ask.turns:
        raise bad_request("input: at least one item is needed", param="input")
    check_support(ask)
    return ask


def _check(request: ResponsesRequest) -> None:
    for param, why in REFUSALS.items():
        if getattr(request, param):
            raise unsupported_error(param, why)
    if request.truncation not in (None, "disabled"):
        raise unsupported_error("truncation", "nothing is left out of a conversation")
    if "message.output_text.logprobs" in (request.include or ()):
        raise unsupported_error("include", REFUSALS["top_logprobs"])


def _choice(choice: str | dict[str, Any] | None) -> Literal["auto", "none"] | ForcedCalls:
    if choice is None or choice == "auto":
        return "auto"
    if choice == "none":
        return "none"
    if choice == "required":
        return ForcedCalls()
    if isinstance(choice, dict) and choice.get("type") == "function":
        return ForcedCalls((_tool_name(choice),))
    tools = choice.get("tools") if isinstance(choice, dict) and choice.get("mode") == "required" else None
    if isinstance(tools, list) and tools:
        return ForcedCalls(tuple(dict.fromkeys(_tool_name(tool) for tool in tools)))
    raise unsupported_error("tool_choice", "auto, none, required, a function, or allowed_tools that are required")


def _tool_name(tool: Any) -> str:
    """The name of a function that a choice names."""
    name = tool.get("name") if isinstance(tool, dict) else None
    if not isinstance(name, str):
        raise bad_request("tool_choice: a function has a name", param="tool_choice")
    return full_name(tool, name)


def _output(text: dict[str, Any] | None) -> ReplyShape | None:
    form = (text or {}).get("format")
    if form is None or (isinstance(form, dict) and form.get("type", "text") == "text"):
        return None
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "json_object":
        return ReplyShape("text.format")
    if kind != "json_schema":
        raise unsupported_error("text.format", f"text, json_object or json_schema, not {kind!r}")
    return ReplyShape("text.format", schema_of(form.get("schema"), "text.format"), form.get("strict") is True)


def turns_of(request: AnyResponses, *, strict: bool = True) -> list[Turn]:
    """The conversation, the instructions first. Raises ApiError 400 for what is none; not `strict`: items that no
    model of ours makes are left out."""
    out: list[Turn] = []
    if request.instructions:
        out.append(Turn("system", [Text(request.instructions)]))
    if isinstance(request.input, str):
        return [*out, Turn("user", [Text(request.input)])]
    parts: list[Part] | None = None
    """what the model's turn that goes on has"""
    for at, item in enumerate(request.input):
        try:
            turn = _turn(item, f"input[{at}]")
        except ApiError:
            if strict:
                raise
            continue
        if turn.role != "assistant":
            out.append(turn)
            parts = None
        elif parts is not None and _goes_on(parts, turn.parts):
            parts += turn.parts
        else:
            parts = [*turn.parts]
            out.append(Turn("assistant", parts))
    return out


def _goes_on(parts: list[Part], more: list[Part]) -> bool:
    """Whether an item of the model belongs to the turn before it: thoughts stand first, and two texts that follow each
    other are two replies."""
    if not parts or not more:
        return False
    if isinstance(more[0], Thinking):
        return isinstance(parts[-1], Thinking)
    return isinstance(more[0], ToolUse) or not isinstance(parts[-1], Text | ModelRefusal | Media)


def _turn(item: dict[str, Any], place: str) -> Turn:
    """One item."""
    match item.get("type", "message"):
        case "message":
            return _message(item, place)
        case "function_call":
            id, name = _string(item, "call_id", place), full_name(item, _string(item, "name", place))
            call = ToolUse(check_name(id, place), check_name(name, place), _string(item, "arguments", place))
            return Turn("assistant", [call])
        case "custom_tool_call":
            id, name = _string(item, "call_id", place), full_name(item, _string(item, "name", place))
            arguments = custom_arguments(_string(item, "input", place))
            return Turn("assistant", [ToolUse(check_name(id, place), check_name(name, place), arguments)])
        case "function_call_output" | "custom_tool_call_output":
            id = check_name(_string(item, "call_id", place), place)
            parts = _parts(item.get("output"), f"{place}.output")
            text = "".join(part.text for part in parts if isinstance(part, Text))
            return Turn("tool", [*(part for part in parts if isinstance(part, Media)), ToolResult(id, text)])
        case "reasoning":
            return Turn("assistant", [Thinking(_thoughts(item))])
        case kind:
            raise unsupported_error(place, f"items of type {kind!r} are not supported")


def _message(item: dict[str, Any], place: str) -> Turn:
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise bad_request(f"{place}.role: Invalid enum value {role!r}", param=place)
    parts = _parts(item.get("content"), f"{place}.content")
    if role == "assistant":
        # pydantic-ai sends thoughts back as a message of their own.
        text = "".join(part.text for part in parts if isinstance(part, Text)).strip()
        if len(parts) == 1 and text.startswith("<think>") and text.endswith("</think>"):
            return Turn("assistant", [Thinking(text.removeprefix("<think>").removesuffix("</think>"))])
    return Turn(ROLES[role], parts)


def _thoughts(item: dict[str, Any]) -> str:
    """The text of a reasoning item; what is encrypted is not read."""
    texts = []
    for field in ("summary", "content"):
        parts = item.get(field)
        texts += [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "".join(text for text in texts if isinstance(text, str))


def _parts(content: Any, place: str) -> list[Part]:
    if content is None or isinstance(content, str):
        return [Text(content or "")]
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise bad_request(f"{place}: is neither text nor a list of parts", param=place)
    parts: list[Part] = []
    for part in content:
        kind = part.get("type")
        if kind in TEXTS:
            parts.append(Text(_string(part, "text", place)))
        elif kind == "refusal":
            parts.append(ModelRefusal(_string(part, "refusal", place)))
        else:
            parts.append(media(MEDIA, kind, place, of_responses(part)))
    return parts or [Text("")]


def _string(item: dict[str, Any], field: str, place: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        raise bad_request(f"{place}.{field}: a text is required", param=place)
    return value
