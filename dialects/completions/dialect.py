"""Legacy completions: a prompt that no template writes, as text or as tokens, and the text that comes after it.

Invariants: the engine gets the tokens of the prompt and no others; a prompt that begins with an earlier one and its
reply goes on from the tokens that were sampled; a reply's text and its log-probabilities are of the same tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import orjson

from millrace.dialects import match_keys
from millrace.dialects.base import Dialect, ReplyStream, StreamEvent
from millrace.dialects.chat.request import Count, Name, Seed, StreamOptions, WholeNumber, biases
from millrace.dialects.common import DONE, decode_request, usage_of
from millrace.dialects.completions.reader import CompletionsReader, choices_by_number, message_of
from millrace.dialects.conversation import Ask, Part, Text, check_stops, prompt_message, unsupported_error
from millrace.dialects.errors import ApiError, bad_request
from millrace.dialects.reading.reader import RecordedCall
from millrace.dialects.writable import WritableCall, WritableChoice
from millrace.schemas import bounds
from millrace.schemas.json_values import Json, JsonObject

MOST = 16
"""tokens of a reply where neither the request nor its session says how many, as at OpenAI"""
Token = Annotated[int, msgspec.Meta(ge=0, le=bounds.INT)]
Prompt = str | list[Token | str | list[Token]]


class AnyCompletions(msgspec.Struct):
    """What must be understood of a request that somebody else answers, or that was accepted before."""

    prompt: Any = ""


class CompletionsRequest(msgspec.Struct):
    """OpenAI's request of a completion, with the `top_k`, `min_p` and `repetition_penalty` of open engines."""

    model: Name
    prompt: Prompt
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Count | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    n: WholeNumber | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: Count | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: WholeNumber | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings as a tuple."""
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


_decoder = msgspec.json.Decoder(CompletionsRequest)
_any_decoder = msgspec.json.Decoder(AnyCompletions)


class Completions(Dialect):
    """`POST /v1/completions`."""

    name = "completions"
    path = "/v1/completions"
    prefix = "cmpl-"
    reader = CompletionsReader

    def parse(self, body: bytes) -> Ask:
        request: CompletionsRequest = decode_request(_decoder, body, with_path=False)
        _check(request)
        return Ask(
            model=request.model,
            turns=[],
            prompt=_prompt(request.prompt),
            stream=bool(request.stream),
            n=request.n or 1,
            max_tokens=request.max_tokens,
            usual_tokens=MOST,
            asked_in="prompt",
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=request.seed,
            stop=request.stops,
            logprobs=request.logprobs is not None,
            top_logprobs=request.logprobs or 0,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
            min_p=request.min_p or 0.0,
            logit_bias=biases(request.logit_bias or {}),
            users=(request.user,),
            given=request,
        )

    def whole(self, call: WritableCall, choices: Sequence[WritableChoice]) -> bytes:
        entries = [_choice(call, choice, _text_of(choice), 0, len(choice.ids), choice.reason) for choice in choices]
        return orjson.dumps({**_head(call), "choices": entries, "usage": usage_of(call)})

    def stream_writer(self, call: WritableCall) -> ReplyStream:
        return CompletionsStream(call)

    def events_of(self, response: Mapping[str, Any]) -> list[StreamEvent]:
        choices = (
            [{**choice, "index": at} for at, choice in choices_by_number(response)] if self.wrote(response) else []
        )
        return [StreamEvent("", orjson.dumps({**response, "choices": choices})), DONE] if choices else []

    def error(self, error: ApiError) -> bytes:
        return error.body()

    def wrote(self, response: Mapping[str, Json]) -> bool:
        return response.get("object") == "text_completion"

    def read(self, request: bytes, response: Mapping[str, Json]) -> RecordedCall:
        parsed_request: AnyCompletions = decode_request(_any_decoder, request, with_path=False)
        replies = {number: message_of(choice) for number, choice in choices_by_number(response)}
        return RecordedCall([prompt_message(_prompt_of(parsed_request.prompt))], None, replies)


class CompletionsStream(ReplyStream):
    """Chunks."""

    def __init__(self, call: WritableCall) -> None:
        self._call = call
        self._told: dict[int, int] = {}
        """characters by choice"""

    def take(self, choice: WritableChoice, parts: Sequence[Part], tokens: int) -> list[StreamEvent]:
        text = "".join(part.text for part in parts if isinstance(part, Text))
        if not text and not (tokens and self._call.request.logprobs):
            return []
        end, before = len(choice.ids), self._told.get(choice.index, 0)
        self._told[choice.index] = before + len(text)
        return [self._event([_choice(self._call, choice, text, end - tokens, end, None, before)])]

    def end(self) -> list[StreamEvent]:
        call = self._call
        out = []
        for choice in call.choices:
            size = len(choice.ids)
            out.append(self._event([_choice(call, choice, "", size, size, choice.reason)]))
        options = call.request.given.stream_options
        if options is not None and options.include_usage:
            out.append(self._event([], usage=usage_of(call)))
        return [*out, DONE]

    def _event(self, choices: Sequence[Mapping[str, Json]], **more: object) -> StreamEvent:
        return StreamEvent("", orjson.dumps({**_head(self._call), "choices": choices, **more}))


def _check(request: CompletionsRequest) -> None:
    refusals: list[tuple[bool, str, str]] = [
        (bool(request.echo), "echo", "the prompt is not said again, and its tokens have no log-probabilities here"),
        (bool(request.suffix), "suffix", "nothing is inserted: the engine writes what comes after a prompt"),
        (request.best_of not in (None, 1), "best_of", "no reply is thrown away: ask for n of them, and choose"),
        (request.n is not None and not 1 <= request.n <= bounds.CHOICES, "n", f"must be 1 to {bounds.CHOICES}"),
    ]
    for is_refused, param, why in refusals:
        if is_refused:
            raise unsupported_error(param, why)
    check_stops(request.stops, "stop")


def _prompt(prompt: Prompt) -> str | tuple[int, ...]:
    """The one prompt of a request. Raises ApiError 400."""
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0] if isinstance(prompt[0], str) else list(prompt[0])
    if not prompt:
        raise bad_request("prompt: at least one token is needed", param="prompt")
    if isinstance(prompt, str):
        return prompt
    tokens = tuple(token for token in prompt if isinstance(token, int))
    if len(tokens) != len(prompt):
        raise unsupported_error("prompt", "one prompt a request: send each of several in a request of its own")
    return tokens


def _prompt_of(prompt: object) -> str | list[int]:
    """The prompt of a recorded request, of whatever shape an upstream took."""
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        return prompt
    return prompt if isinstance(prompt, str) else match_keys.canonical(prompt).decode(errors="replace")


def _head(call: WritableCall) -> JsonObject:
    """What every response and every chunk begins with."""
    return {
        "id": call.response_id,
        "object": "text_completion",
        "created": call.when // 1_000_000,
        "model": call.request.model,
        "system_fingerprint": None,
    }


def _text_of(choice: WritableChoice) -> str:
    return choice.content or ""


def _choice(
    call: WritableCall, choice: WritableChoice, text: str, start: int, end: int, finish: str | None, before: int = 0
) -> JsonObject:
    """What a choice says with its tokens [start, end), behind `before` characters."""
    logprobs = _logprobs(call, choice, start, end, before) if call.request.logprobs and end > start else None
    return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _logprobs(call: WritableCall, choice: WritableChoice, start: int, end: int, before: int) -> JsonObject:
    """Log-probabilities of tokens as this API has them: a list for each thing that is said of a token."""
    name = call.token
    texts = [name(id) for id in choice.ids[start:end]]
    offsets = []
    for one in texts:
        offsets.append(before)
        before += len(one)
    tops = None
    if call.request.top_logprobs:
        rivals = choice.tops[start:end] if choice.tops else [()] * (end - start)
        tops = [{name(id): max(logprob, -9999.0) for id, logprob in token_rivals} for token_rivals in rivals]
    logprobs = [max(logprob, -9999.0) for logprob in choice.logprobs[start:end]]
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}
