"""One conversation, whatever API it comes by: what is asked, in turns of typed parts, and how it is to be answered.

A dialect of `millrace.dialects` makes an `Ask` of a request and writes the parts of a reply; what
lies behind it (lineages, match keys, renderers) takes messages, which `messages_of` makes of turns.

Invariants: a part that no renderer writes is refused with its place, never left out; what a template or an engine
cannot do is refused here for all dialects alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from millrace.dialects.errors import ApiError, bad_request
from millrace.dialects.media import Address
from millrace.dialects.rendering.base import RAW, Message, Tools
from millrace.dialects.stored_responses import StoredRequest
from millrace.schemas import bounds
from millrace.schemas.json_values import JsonObject


class Text(msgspec.Struct, frozen=True, gc=False):
    """Words of either side."""

    text: str


class Thinking(msgspec.Struct, frozen=True, gc=False):
    """Reasoning of the model. `signature` is what an API sends along with it, "" where it has none."""

    text: str
    signature: str = ""


class ToolUse(msgspec.Struct, frozen=True, gc=False):
    """A call that the model makes; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


class ToolUsePiece(msgspec.Struct, frozen=True, gc=False):
    """More of the arguments of a call that is being made; the ToolUse of the same id is its end."""

    id: str
    name: str
    arguments: str


class ToolResult(msgspec.Struct, frozen=True, gc=False):
    """What a tool answered to the call with the id `call`, which may be missing. `name`: the tool's, where said."""

    call: str | None
    text: str
    name: str | None = None


NO_ADDRESS = Address()
Kind: TypeAlias = Literal["image", "audio", "file", "unknown"]


class Media(msgspec.Struct, frozen=True, gc=False):
    """What is no text: an image, audio, a file, or a part that nobody here knows. `type` is its name in the client's
    API, `at` its place in the request, `address` where it is, which may be in the address itself."""

    kind: Kind
    type: str | None
    at: str
    address: Address = NO_ADDRESS


def media(kinds: Mapping[str, Kind], type: object, at: str, address: Address = NO_ADDRESS) -> Media:
    """A part of the type that its client calls so; `kinds` are those that an API has."""
    if not isinstance(type, str):
        return Media("unknown", None, at, address)
    return Media(kinds.get(type, "unknown"), type, at, address)


class ModelRefusal(msgspec.Struct, frozen=True, gc=False):
    """The model's own words that it will not answer."""

    text: str


Part: TypeAlias = Text | Thinking | ToolUse | ToolUsePiece | ToolResult | Media | ModelRefusal


class Turn(msgspec.Struct, frozen=True):
    """What one side said at once. `name`: the speaker's, where it is said."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    parts: list[Part]
    name: str | None = None


class ForcedCalls(msgspec.Struct, frozen=True, gc=False):
    """The reply must be tool calls: of the tools `names`, or of any where these are none."""

    names: tuple[str, ...] = ()


class ReplyShape(msgspec.Struct, frozen=True, gc=False):
    """The reply must be a JSON object, or JSON of a `schema` where there is one. `param` is the field that asks for
    it. `strict`: its client takes it for granted; engines of ours always hold to it."""

    param: str
    schema: JsonObject | None = None
    strict: bool = False


class Ask(msgspec.Struct, kw_only=True):
    """A request. `tools` are as templates want them. `given` is the request as its dialect parsed it, for what that
    dialect alone needs when it answers. `max_tokens` beyond the room that is left is cut to it where `fitted`; where
    neither it nor its session says how many, `usual_tokens` are sampled at most, None: as many as there is room for.
    `asked_in`: the field that holds what is asked."""

    model: str
    turns: list[Turn]
    tools: Tools = None
    strict_tools: frozenset[str] = frozenset()
    """names of those whose calls are to fit their schemas, where that is said"""
    choice: Literal["auto", "none"] | ForcedCalls = "auto"
    output: ReplyShape | None = None
    parallel: bool = True
    """whether several calls at once are wanted, where calls are forced"""
    stream: bool = False
    n: int = 1
    max_tokens: int | None = None
    fitted: bool = False
    usual_tokens: int | None = None
    asked_in: str = "messages"
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    name: str | None = None
    """what the body calls the conversation"""
    users: tuple[object, ...] = ()
    """what the body says of the end user: the first text among these"""
    prompt: str | tuple[int, ...] | None = None
    """the prompt itself, as text or as tokens, in place of turns: no template writes it"""
    given: Any = None
    inside: Mapping[str, tuple[str, str]] = {}
    """(namespace, name) of the tools that are in one, by the name that the model knows"""
    hosted: tuple[str, ...] = ()
    """places of the tools that only the API's own servers could run; the model is not shown them"""
    stored: StoredRequest | None = None
    """what it said, where its response may be named by later requests"""

    @property
    def held(self) -> bool:
        """Whether the reply is to have a shape, or to be calls."""
        return self.output is not None or isinstance(self.choice, ForcedCalls)


def prompt_message(prompt: str | Sequence[int]) -> Message:
    """A prompt that no template writes as the one message of its conversation; tokens by their numbers."""
    text = prompt if isinstance(prompt, str) else f"[{', '.join(map(str, prompt))}]"
    return {"role": "user", "content": text, RAW: True}


def messages_of(turns: Sequence[Turn], *, strict: bool = True) -> list[Message]:
    """Turns as templates and match keys want them: one message each, and one for each result of a tool, in order.
    Raises ApiError 400 for a part that is no text; not `strict`: it is left out."""
    out: list[Message] = []
    for turn in turns:
        if len(turn.parts) == 1 and type(part := turn.parts[0]) is Text:  # as most are
            out.append(_message(turn, part.text))
        else:
            _say(turn, strict, out)
    return out


def _say(turn: Turn, strict: bool, out: list[Message]) -> None:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[JsonObject] = []
    has_results = False
    for part in turn.parts:
        match part:
            case Text() | ModelRefusal():
                texts.append(part.text)
            case Thinking():
                thoughts.append(part.text)
            case ToolUse():
                function = {"name": part.name, "arguments": part.arguments}
                calls.append({"id": part.id, "type": "function", "function": function})
            case ToolResult():
                if texts:
                    out.append(_message(turn, "".join(texts)))
                    texts = []
                out.append(_result(part))
                has_results = True
            case Media() if strict:
                raise bad_request(f"Only text content is supported, not {part.type!r}", param=part.at)
    if texts or not has_results:
        message = _message(turn, "".join(texts), calls)
        if reasoning := "".join(thoughts):
            message["reasoning_content"] = reasoning
        out.append(message)


def _message(turn: Turn, text: str, calls: Sequence[JsonObject] = ()) -> JsonObject:
    out: JsonObject = {"role": turn.role, "content": text}
    if calls:
        out["tool_calls"] = calls
    if turn.name is not None:
        out["name"] = turn.name
    return out


def _result(part: ToolResult) -> Message:
    out: JsonObject = {"role": "tool", "content": part.text}
    if part.call is not None:
        out["tool_call_id"] = part.call
    if part.name is not None:
        out["name"] = part.name
    return out


def check_support(ask: Ask) -> None:
    """Raises ApiError 400 for what no engine here does."""
    if isinstance(ask.choice, ForcedCalls):
        functions = [tool.get("function") for tool in ask.tools or ()]
        tool_names = {function.get("name") for function in functions if isinstance(function, dict)}
        if not tool_names:
            raise bad_request("tool_choice: calls are forced only where tools are offered", param="tool_choice")
        for name in ask.choice.names:
            if name not in tool_names:
                raise bad_request(f"tool_choice: there is no tool {name!r} among the tools", param="tool_choice")


def check_strict(ask: Ask, unknown: Sequence[str], words: str) -> None:
    """Raises ApiError 400 for what a strict gateway refuses: a shape or calls that are forced, penalties, a bias,
    min_p, hosted tools, and the first of the fields that are `unknown`, in the words `words`."""
    for param in unknown:
        raise ApiError(400, words.format(param), param=param, code="unknown_parameter")
    for place in ask.hosted:
        raise unsupported_error(place, "the gateway runs no tools, and this gateway is strict")
    changes = {
        "tool_choice": isinstance(ask.choice, ForcedCalls),
        "response_format" if ask.output is None else ask.output.param: ask.output is not None,
        "presence_penalty": ask.presence_penalty != 0,
        "frequency_penalty": ask.frequency_penalty != 0,
        "repetition_penalty": ask.repetition_penalty != 1,
        "min_p": ask.min_p != 0,
        "logit_bias": bool(ask.logit_bias),
    }
    for param, is_refused in changes.items():
        if is_refused:
            raise unsupported_error(param, "its reply could not train, and this gateway is strict")


def unknown_fields(ask: Ask, body: bytes) -> list[str]:
    """Fields of a request that its API, as it is parsed here, does not have."""
    names = {field.encode_name for field in msgspec.structs.fields(ask.given)}
    return [field for field in msgspec.json.decode(body, type=dict[str, msgspec.Raw]) if field not in names]


def schema_of(value: object, param: str) -> JsonObject | None:
    """The JSON schema that a field holds, None where there is none. Raises ApiError 400 for what is no schema."""
    if value is None or isinstance(value, dict):
        return value
    raise bad_request(f"{param}: a schema is a JSON object", param=param)


def check_stops(stops: Sequence[str], param: str) -> None:
    """Raises ApiError 400 for stop strings beyond the bounds."""
    if len(stops) > bounds.STOPS or not all(stops):
        raise unsupported_error(param, f"at most {bounds.STOPS} strings, none of them empty")
    if any(len(stop.encode(errors="surrogatepass")) > bounds.NAME_BYTES for stop in stops):
        raise unsupported_error(param, f"at most {bounds.NAME_BYTES} bytes each")


def unsupported_error(param: str, why: str) -> ApiError:
    """The refusal of a field that asks for what is not served."""
    return ApiError(400, f"{param}: {why}", param=param, code="unsupported_parameter")
