"""What clients of chat completions send: OpenAI's request, typed, and what of it this gateway serves.

Policy for fields: what asks for something that is not served is refused with 400, never ignored; what changes nothing
here (`user`, `metadata`, ...) and what nobody here knows is accepted and kept with the captured request, unless the
gateway is strict; unknown keys inside messages are ignored, since frameworks add their own.

Invariant: every number, name, list and depth is within `millrace.schemas.bounds` once a request is parsed."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
import orjson

from millrace.dialects import shape
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
    check_stops,
    check_support,
    media,
    messages_of,
    schema_of,
    unsupported_error,
)
from millrace.dialects.errors import bad_request
from millrace.dialects.media import of_chat
from millrace.dialects.rendering.base import Message, Tools
from millrace.schemas import bounds

MEDIA: dict[Any, Kind] = {
    "image_url": "image", "input_audio": "audio", "file": "file",
}  # fmt: skip
Count = Annotated[int, msgspec.Meta(ge=0, le=bounds.INT)]
WholeNumber = Annotated[int, msgspec.Meta(ge=-bounds.INT, le=bounds.INT)]
Seed = Annotated[int, msgspec.Meta(ge=-bounds.SEED - 1, le=bounds.SEED)]
Name = Annotated[str, msgspec.Meta(max_length=bounds.NAME_BYTES)]


JSON_ALONE = "a reply is held to JSON alone: response_format, guided_json or structured_outputs"
ENDS = "a reply ends where the model ends it, at a stop string or at max_tokens"
REFUSALS = {
    **dict.fromkeys(("guided_regex", "guided_choice", "guided_grammar", "structural_tag"), JSON_ALONE),
    **dict.fromkeys(("stop_token_ids", "min_tokens", "ignore_eos"), ENDS),
    **dict.fromkeys(("bad_words", "allowed_token_ids"), "use logit_bias"),
    **dict.fromkeys(("logits_processors", "use_beam_search"), "tokens are drawn one by one by the policy"),
    **dict.fromkeys(("prompt_logprobs", "echo"), "of a prompt nothing is told"),
    "continue_final_message": "a reply cannot be begun for the model",
    "truncate_prompt_tokens": "nothing is left out of a conversation",
    "chat_template": "the model's own template is used",
    "documents": "put them into a message",
}
"""fields of open engines that are refused where they ask for something, never passed over"""


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
    refusal: str | None = None
    function_call: FunctionIn | None = None


class StreamOptions(msgspec.Struct):
    """Only `include_usage` has an effect."""

    include_usage: bool = False


class ChatRequest(msgspec.Struct):
    """OpenAI's chat completion request, with those fields of open engines that would alter a reply."""

    model: Name
    messages: list[MessageIn]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=bounds.INT)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    n: WholeNumber | None = None
    seed: Seed | None = None
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
    reasoning_effort: Name | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    guided_json: Any = None
    structured_outputs: dict[str, Any] | None = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structural_tag: Any = None
    stop_token_ids: Any = None
    min_tokens: Any = None
    ignore_eos: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    logits_processors: Any = None
    use_beam_search: Any = None
    prompt_logprobs: Any = None
    echo: Any = None
    continue_final_message: Any = None
    truncate_prompt_tokens: Any = None
    chat_template: Any = None
    documents: Any = None
    modalities: list[str] | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    web_search_options: Any = None

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
        return messages_of([_turn(message, at) for at, message in enumerate(self.messages)], strict=False)


_decoder = msgspec.json.Decoder(ChatRequest)
_any_decoder = msgspec.json.Decoder(AnyChat)


def parse_any(body: bytes) -> AnyChat:
    """The little that any chat request must have; messages that no engine of ours could read are left out. Raises
    ApiError 400."""
    shape.check(body)
    try:
        return _any_decoder.decode(body)
    except msgspec.ValidationError:
        pass
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise shape.json_refusal(body, error) from None
    try:
        request = msgspec.json.decode(body, type=dict[str, Any])
        messages = request.get("messages")
        if isinstance(messages, list):
            request["messages"] = [
                chat_message for message in messages if (chat_message := _in_tool_shape(message)) is not None
            ]
        return msgspec.convert(request, AnyChat)
    except msgspec.ValidationError as error:
        raise bad_request(str(error)) from None


def _in_tool_shape(message: Any) -> MessageIn | None:
    """A message with results of functions and calls of custom tools as those of tools, None for one in no shape."""
    match message:
        case {"role": "function"}:
            message = {**message, "role": "tool"}
        case {"tool_calls": list(calls)}:
            message = {**message, "tool_calls": [_usual_call(call) for call in calls]}
    try:
        return msgspec.convert(message, MessageIn)
    except msgspec.ValidationError:
        return None


def _usual_call(call: Any) -> Any:
    match call:
        case {"custom": {"name": name, "input": given}}:
            return {**call, "function": {"name": name, "arguments": given}}
    return call


def parse_chat(body: bytes) -> ChatRequest:
    """The request. Raises ApiError 400 for what is no JSON, has wrong types, or asks for what is not served."""
    request: ChatRequest = decode_request(_decoder, body, with_path=False)
    _check(request)
    return request


def ask_of(request: ChatRequest) -> Ask:
    """What a request asks. Raises ApiError 400 for what is not served."""
    output = request.response_format
    most = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    ask = Ask(
        model=request.model,
        turns=[_check_turn(message, at) for at, message in enumerate(request.messages)],
        tools=request.offered,
        strict_tools=_strict(request.tools),
        choice=_choice(request.tool_choice),
        output=_guided_shape(request) if output is None or output.get("type", "text") == "text" else _shape(output),
        parallel=request.parallel_tool_calls is not False,
        stream=bool(request.stream),
        n=request.n or 1,
        max_tokens=most,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=0 if request.top_k == -1 else request.top_k,
        seed=request.seed,
        stop=request.stops,
        logprobs=bool(request.logprobs),
        top_logprobs=request.top_logprobs or 0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        min_p=request.min_p or 0.0,
        logit_bias=biases(request.logit_bias or {}),
        users=(request.user, request.safety_identifier),
        given=request,
    )
    check_support(ask)
    for at, tool in enumerate(request.tools or ()):
        if tool.get("type") == "custom":
            raise unsupported_error(f"tools[{at}]", "only function tools are supported, not 'custom'")
    return ask


def _strict(tools: list[dict[str, Any]] | None) -> frozenset[str]:
    """Names of the functions that are said to be strict."""
    functions = [function for tool in tools or () if isinstance(function := tool.get("function"), dict)]
    return frozenset(
        function["name"]
        for function in functions
        if function.get("strict") is True and isinstance(function.get("name"), str)
    )


def _choice(choice: str | dict[str, Any] | None) -> Literal["auto", "none"] | ForcedCalls:
    if choice is None or choice == "auto":
        return "auto"
    if choice == "none":
        return "none"
    if choice == "required":
        return ForcedCalls()
    if isinstance(choice, dict) and choice.get("type") == "function":
        return ForcedCalls((_function_name(choice),))
    allowance = choice.get("allowed_tools") if isinstance(choice, dict) else None
    tools = allowance.get("tools") if isinstance(allowance, dict) and allowance.get("mode") == "required" else None
    if isinstance(tools, list) and tools:
        return ForcedCalls(tuple(dict.fromkeys(_function_name(tool) for tool in tools)))
    raise unsupported_error("tool_choice", "auto, none, required, a function, or allowed_tools that are required")


def _function_name(tool: Any) -> str:
    """The name of a function that a choice names."""
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise bad_request("tool_choice: a function has a name", param="tool_choice")
    return name


def _shape(output: dict[str, Any]) -> ReplyShape:
    match output.get("type"):
        case "json_object":
            return ReplyShape("response_format")
        case "json_schema":
            fields = output.get("json_schema")
            if not isinstance(fields, dict):
                raise bad_request("response_format: json_schema holds a name and a schema", param="response_format")
            schema = schema_of(fields.get("schema"), "response_format")
            return ReplyShape("response_format", schema, fields.get("strict") is True)
        case kind:
            raise unsupported_error("response_format", f"text, json_object or json_schema, not {kind!r}")


def _guided_shape(request: ChatRequest) -> ReplyShape | None:
    """The shape that the fields of open engines ask for."""
    schema: Any = request.guided_json
    if schema is not None:
        return ReplyShape("guided_json", _schema(schema, "guided_json"))
    constraints = {
        name: value for name, value in (request.structured_outputs or {}).items() if value not in (None, False)
    }
    match constraints:
        case {"json": schema, **rest} if not rest:
            return ReplyShape("structured_outputs", _schema(schema, "structured_outputs"))
        case {"json_object": _, **rest} if not rest:
            return ReplyShape("structured_outputs")
        case {} if not constraints:
            return None
    raise unsupported_error("structured_outputs", "only json and json_object, one of them")


def _schema(value: Any, param: str) -> dict[str, Any] | None:
    """A schema, which open engines take as text too."""
    if isinstance(value, str):
        if shape.unwieldy(value):
            raise bad_request(f"{param}: a schema is a JSON object within the limits", param=param)
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise bad_request(f"{param}: a schema is JSON: {error}", param=param) from None
    return schema_of(value, param)


def biases(by_token: dict[str, float]) -> tuple[tuple[int, float], ...]:
    """The tokens of a bias and what is added to each. Raises ApiError 400."""
    if len(by_token) > bounds.BIASES:
        raise unsupported_error("logit_bias", f"at most {bounds.BIASES} tokens")
    if not all(token.isascii() and token.isdecimal() and len(token) < 10 for token in by_token):
        raise bad_request("logit_bias: its names are token ids", param="logit_bias")
    return tuple((int(token), bias) for token, bias in by_token.items())


def _check_turn(message: MessageIn, at: int) -> Turn:
    turn = _turn(message, at)
    _check_names(message, at)
    return turn


def _turn(message: MessageIn, at: int) -> Turn:
    """One message, number `at`."""
    if message.role == "tool":
        content = _parts(message.content, at)
        text = "".join(part.text for part in content if isinstance(part, Text))
        media: list[Part] = [part for part in content if isinstance(part, Media)]
        return Turn("tool", [*media, ToolResult(message.tool_call_id, text, message.name)])
    parts = _parts(message.content, at)
    for call in message.tool_calls or ():
        parts.append(ToolUse(call.id, call.function.name, _plain(call.function)))
    if message.function_call and not message.tool_calls:
        parts.append(ToolUse("", message.function_call.name, _plain(message.function_call)))
    if message.refusal:
        parts.append(ModelRefusal(message.refusal))
    if thoughts := message.reasoning_content or message.reasoning:
        parts.append(Thinking(thoughts))
    return Turn(message.role, parts, message.name)


def _check_names(message: MessageIn, at: int) -> None:
    names = [message.tool_call_id, message.name]
    if message.function_call:
        names.append(message.function_call.name)
    for call in message.tool_calls or ():
        names += [call.id, call.function.name]
    for name in names:
        if name and len(name) > bounds.NAME_BYTES // 4 and len(name.encode()) > bounds.NAME_BYTES:
            raise bad_request(f"A name is longer than {bounds.NAME_BYTES} bytes", param=f"messages[{at}]")


def _plain(function: FunctionIn) -> str:
    arguments = function.arguments
    if isinstance(arguments, str):
        return arguments
    try:
        return orjson.dumps(arguments).decode()
    except TypeError:  # an integer of more than 64 bits
        return json.dumps(arguments, ensure_ascii=False)


def _parts(content: str | list[dict[str, Any]] | None, at: int) -> list[Part]:
    if isinstance(content, str):
        return [Text(content)]
    parts: list[Part] = []
    for part in content or ():
        text, kind = part.get("text"), part.get("type")
        if kind in ("text", "input_text", "output_text") and isinstance(text, str):
            parts.append(Text(text))
        else:
            parts.append(media(MEDIA, kind, f"messages[{at}].content", of_chat(part)))
    return parts


def _check(request: ChatRequest) -> None:
    refusals: list[tuple[bool, str, str]] = [
        (not request.messages, "messages", "at least one message is needed"),
        (any(kind != "text" for kind in request.modalities or ()), "modalities", "only text is made"),
        (bool(request.functions), "functions", "calls are asked for by tools"),
        (bool(request.function_call), "function_call", "calls are asked for by tools"),
        (request.web_search_options is not None, "web_search_options", "the gateway calls no tools"),
        (request.n is not None and not 1 <= request.n <= bounds.CHOICES, "n", f"must be 1 to {bounds.CHOICES}"),
        (bool(request.top_logprobs) and not request.logprobs, "top_logprobs", "needs logprobs: true"),
    ]
    refusals += [(bool(getattr(request, param)), param, why) for param, why in REFUSALS.items()]
    for is_refused, param, why in refusals:
        if is_refused:
            raise unsupported_error(param, why)
    check_stops(request.stops, "stop")
