"""What clients of Anthropic's Messages send, typed, and what of it this gateway serves.

Policy for fields: as `millrace.dialects.chat.request` has it. `cache_control` and citations say
nothing that a model reads, wherever they stand. Thoughts are the model's own: an echo of them is kept, a redacted one
is not read.

Invariant: every number, name, list and depth is within `millrace.schemas.bounds` once a request is parsed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import orjson

from millrace.dialects import shape
from millrace.dialects.common import decode_request
from millrace.dialects.conversation import (
    Ask,
    ForcedCalls,
    Kind,
    Part,
    ReplyShape,
    Text,
    Thinking,
    ToolResult,
    ToolUse,
    Turn,
    check_stops,
    check_support,
    media,
    schema_of,
    unsupported_error,
)
from millrace.dialects.errors import ApiError, bad_request
from millrace.dialects.media import of_messages
from millrace.dialects.rendering.base import Tools
from millrace.schemas import bounds

Count = Annotated[int, msgspec.Meta(ge=0, le=bounds.INT)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=bounds.INT)]
Name = Annotated[str, msgspec.Meta(max_length=bounds.NAME_BYTES)]
Content = str | list[dict[str, Any]]

MEDIA: dict[Any, Kind] = {"image": "image", "document": "file"}
BILLING = "x-anthropic-billing-header:"
"""begins a block of Claude Code's system text that is meant for the API and changes with each of its versions"""
HOSTED_PREFIXES = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_")
"""how the kinds of tools begin that Anthropic runs itself: no model of ours is shown one"""
NO_THREADS = "thread_unsupported_request"
"""the code by which Anthropic's clients go on without threads"""
SHOWN_KINDS = ("enabled", "adaptive", "between_tools")


class TurnIn(msgspec.Struct):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Content


class AnyMessages(msgspec.Struct, kw_only=True):
    """What must be understood of a request that was accepted before."""

    messages: list[TurnIn]
    system: Content | None = None
    tools: list[dict[str, Any]] | None = None
    thread: Any = None


class CountRequest(AnyMessages, kw_only=True):
    """`POST /v1/messages/count_tokens`."""

    model: Name
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: Any = None
    context_management: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None
    cache_control: Any = None
    betas: Any = None
    speed: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None


class MessagesRequest(CountRequest, kw_only=True):
    """Anthropic's request to create a message."""

    max_tokens: Positive
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Count | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Any = None
    inference_geo: Any = None
    diagnostics: Any = None
    billing_policy: Any = None
    fallback_credit_token: Any = None
    container: Any = None
    compaction: Any = None
    fallbacks: list[Any] | None = None

    @property
    def shows_thinking(self) -> bool:
        """Whether the client asked for the thoughts."""
        settings = self.thinking or {}
        return settings.get("type") in SHOWN_KINDS and settings.get("display") != "omitted"


_decoder = msgspec.json.Decoder(MessagesRequest)
_count_decoder = msgspec.json.Decoder(CountRequest)
_any_decoder = msgspec.json.Decoder(AnyMessages)


def parse_messages(body: bytes) -> MessagesRequest:
    """The request. Raises ApiError 400 for what is no JSON, or has wrong types."""
    request: MessagesRequest = decode_request(_decoder, body)
    return request


def parse_count(body: bytes) -> CountRequest:
    """The same for a request to count tokens."""
    request: CountRequest = decode_request(_count_decoder, body)
    return request


def parse_any(body: bytes) -> AnyMessages:
    """The little that any request must have. Raises ApiError 400."""
    request: AnyMessages = decode_request(_any_decoder, body)
    return request


def ask_of(request: CountRequest) -> Ask:
    """What a request asks. Raises ApiError 400 for what is not served."""
    if isinstance(request, MessagesRequest) and request.thread:
        # Before anything else: by this code clients send the whole conversation instead.
        message = "thread: is not supported: send the full conversation without it"
        raise bad_request(message, param="thread", code=NO_THREADS)
    ask = Ask(
        model=request.model,
        turns=turns_of(request),
        tools=tools_of(request.tools),
        strict_tools=_strict(request.tools),
        choice=_choice(request.tool_choice),
        output=_output(request),
        parallel=not (request.tool_choice or {}).get("disable_parallel_tool_use"),
        given=request,
        hosted=hosted_places(request.tools),
    )
    _check(request)
    check_support(ask)
    if not isinstance(request, MessagesRequest):
        return ask
    _check_more(request)
    ask.stream = bool(request.stream)
    ask.max_tokens, ask.fitted = request.max_tokens, True
    ask.temperature, ask.top_p, ask.top_k = request.temperature, request.top_p, request.top_k
    ask.stop = tuple(request.stop_sequences or ())
    user = (request.metadata or {}).get("user_id")
    ask.name = session_of(user)
    ask.users = () if ask.name else (user,)
    return ask


def session_of(user: Any) -> str | None:
    """The session that a user's id names: Claude Code sends a JSON text with one."""
    if not isinstance(user, str) or not user.startswith("{") or shape.unwieldy(user):
        return None
    try:
        fields = orjson.loads(user)
    except orjson.JSONDecodeError:
        return None
    session = fields.get("session_id") if isinstance(fields, dict) else None
    return session if isinstance(session, str) and session else None


def _check(request: CountRequest) -> None:
    if not request.messages:
        raise bad_request("messages: at least one message is required", param="messages")
    if request.messages[-1].role == "assistant":
        raise bad_request(
            "messages: the conversation must end with a user message: a reply cannot be begun for the model",
            param="messages",
        )
    if request.mcp_servers:
        raise unsupported_error("mcp_servers", "the gateway calls no tools")
    edits = (request.context_management or {}).get("edits") or []
    for edit in edits if isinstance(edits, list) else [edits]:
        fields = edit if isinstance(edit, dict) else {}
        if not str(fields.get("type")).startswith("clear_thinking") or fields.get("keep") != "all":
            raise unsupported_error(
                "context_management", "only thoughts can be asked for, all of them: nothing is cleared"
            )


def _check_more(request: MessagesRequest) -> None:
    check_stops(request.stop_sequences or (), "stop_sequences")
    for param in ("container", "compaction", "fallbacks"):
        if getattr(request, param):
            raise unsupported_error(param, "is not supported")


def _choice(choice: dict[str, Any] | None) -> Literal["auto", "none"] | ForcedCalls:
    kind = (choice or {}).get("type", "auto")
    if kind == "none":
        return "none"
    if kind == "auto":
        return "auto"
    if kind == "any":
        return ForcedCalls()
    name = (choice or {}).get("name")
    if kind != "tool" or not isinstance(name, str):
        raise unsupported_error("tool_choice", "auto, none, any, or a tool by its name")
    return ForcedCalls((name,))


def _output(request: CountRequest) -> ReplyShape | None:
    for param, form in (
        ("output_config", (request.output_config or {}).get("format")),
        ("output_format", request.output_format),
    ):
        if form is None:
            continue
        if not isinstance(form, dict) or form.get("type") != "json_schema":
            raise unsupported_error(param, "a format is a json_schema")
        return ReplyShape(param, schema_of(form.get("schema"), param), strict=True)
    return None


def tools_of(tools: list[dict[str, Any]] | None, *, strict: bool = True) -> Tools:
    """The tools as templates want them, so that clients of either API offer the same ones; those of `hosted_places` are
    not among them. Raises ApiError 400; not `strict`: tools that no model of ours could call stay as they are."""
    if not strict:
        try:
            return tools_of(tools)
        except ApiError:
            return [_to_function(tool) for tool in tools or ()]
    return [_tool(tool, at) for at, tool in enumerate(tools or ()) if not _is_hosted(tool)] or None


def _strict(tools: list[dict[str, Any]] | None) -> frozenset[str]:
    """Names of the tools that are said to be strict."""
    strict_tools = [tool for tool in tools or () if tool.get("strict") is True and isinstance(tool.get("name"), str)]
    return frozenset(tool["name"] for tool in strict_tools)


def hosted_places(tools: list[dict[str, Any]] | None) -> tuple[str, ...]:
    """Places of tools that only Anthropic could run."""
    return tuple(f"tools.{at}" for at, tool in enumerate(tools or ()) if _is_hosted(tool))


def _is_hosted(tool: dict[str, Any]) -> bool:
    kind = tool.get("type")
    return isinstance(kind, str) and kind.startswith(HOSTED_PREFIXES)


def _to_function(tool: dict[str, Any]) -> dict[str, Any]:
    try:
        return _tool(tool, 0)
    except ApiError:
        return tool


def _tool(tool: dict[str, Any], at: int) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise unsupported_error(f"tools.{at}", f"only custom tools are supported, not {tool['type']!r}")
    name, schema, description = tool.get("name"), tool.get("input_schema"), tool.get("description")
    if not isinstance(name, str) or not isinstance(schema, dict):
        raise bad_request(f"tools.{at}: a tool has a name and an input_schema", param=f"tools.{at}")
    function: dict[str, Any] = {"name": _check_name(name, f"tools.{at}")}
    if description is not None:
        if not isinstance(description, str):
            raise bad_request(f"tools.{at}.description: is no text", param=f"tools.{at}")
        function["description"] = description
    return {"type": "function", "function": {**function, "parameters": schema}}


def turns_of(request: AnyMessages, *, strict: bool = True) -> list[Turn]:
    """The conversation, the system text first. Raises ApiError 400 for what is none; not `strict`: what is no text in
    the result of a tool is left out."""
    out: list[Turn] = []
    if request.system:
        blocks = request.system
        if isinstance(blocks, list):
            blocks = [block for block in blocks if not str(block.get("text")).startswith(BILLING)]
        if parts := _parts(blocks, "system", "\n", strict):
            out.append(Turn("system", parts))
    for at, message in enumerate(request.messages):
        gap = "" if message.role == "assistant" else "\n"
        out.append(Turn(message.role, _parts(message.content, f"messages.{at}.content", gap, strict)))
    return out


def _parts(content: Content, place: str, gap: str, strict: bool) -> list[Part]:
    """The parts of a message. Text blocks that follow each other are one text, with `gap` between them."""
    if isinstance(content, str):
        return [Text(content)]
    parts: list[Part] = []
    texts: list[str] = []
    for at, block in enumerate(content):
        part = _part(block, f"{place}.{at}", strict)
        if isinstance(part, Text):
            texts.append(part.text)
        elif part is not None:
            parts += _join(texts, gap)
            texts.clear()
            parts.append(part)
    return [*parts, *_join(texts, gap)]


def _join(texts: Sequence[str], gap: str) -> list[Part]:
    return [Text(gap.join(texts))] if texts else []


def _part(block: dict[str, Any], place: str, strict: bool) -> Part | None:
    kind = block.get("type")
    match kind:
        case "text":
            return Text(_string(block, "text", place))
        case "thinking":
            signature = block.get("signature")
            return Thinking(_string(block, "thinking", place), signature if isinstance(signature, str) else "")
        case "redacted_thinking":
            return None
        case "tool_use":
            id, name = _string(block, "id", place), _string(block, "name", place)
            return ToolUse(_check_name(id, place), _check_name(name, place), arguments_of(block.get("input")))
        case "tool_result":
            id = _check_name(_string(block, "tool_use_id", place), place)
            return ToolResult(id, _result(block.get("content"), place, strict))
        case _:
            return media(MEDIA, kind, place, of_messages(block))


def _result(content: Any, place: str, strict: bool) -> str:
    """The text of a tool's result."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise bad_request(f"{place}.content: is neither text nor blocks", param=place)
    texts = []
    for at, block in enumerate(content):
        if block.get("type") == "tool_reference":  # the name of a tool that a search found
            texts.append(_string(block, "tool_name", f"{place}.content.{at}"))
            continue
        if block.get("type") != "text":
            if not strict:
                continue
            raise _no_text(block.get("type"), f"{place}.content.{at}")
        texts.append(_string(block, "text", f"{place}.content.{at}"))
    return "\n".join(texts)


def _no_text(kind: Any, place: str) -> ApiError:
    return bad_request(f"{place}: Only text content is supported, not {kind!r}", param=place)


def _string(block: dict[str, Any], field: str, place: str) -> str:
    value = block.get(field)
    if not isinstance(value, str):
        raise bad_request(f"{place}.{field}: a text is required", param=place)
    return value


def _check_name(name: str, place: str) -> str:
    if len(name) > bounds.NAME_BYTES // 4 and len(name.encode(errors="surrogatepass")) > bounds.NAME_BYTES:
        raise bad_request(f"{place}: A name is longer than {bounds.NAME_BYTES} bytes", param=place)
    return name


def arguments_of(value: Any) -> str:
    """A tool's input as text. Text stands for a model's input that is no JSON, which was given to the client so."""
    if isinstance(value, str):
        return value
    try:
        return orjson.dumps({} if value is None else value).decode()
    except TypeError:  # an integer of more than 64 bits
        return json.dumps(value, ensure_ascii=False)
