"""vLLM's token-in token-out JSON (`POST /inference/v1/generate`): the subset that we send, and read back typed.

Decoding through msgspec skips every field that is not named here, which is most of what vLLM sends per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import orjson

from infra.labels import MIXED, is_base
from producers.engines.base import Chunk, Sampling, Span, Usage


class Candidate(msgspec.Struct):
    """One token with its log-probability; rank 1 is the most likely."""

    token_id: int
    logprob: float
    rank: int | None = None


class Position(msgspec.Struct):
    """The sampled token of one position."""

    logprob: float


class PositionWithTop(msgspec.Struct):
    """The sampled token of one position and its rivals."""

    logprob: float
    top_logprobs: list[Candidate] = []


class Logprobs(msgspec.Struct):
    content: list[Position] | None = None


class LogprobsWithTop(msgspec.Struct):
    content: list[PositionWithTop] | None = None


class VersionSpan(msgspec.Struct):
    version: str
    start: int
    end: int


class Choice(msgspec.Struct):
    index: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    weight_versions: list[VersionSpan] | None = None
    logprobs: Logprobs | None = None


class ChoiceWithTop(msgspec.Struct):
    index: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    weight_versions: list[VersionSpan] | None = None
    logprobs: LogprobsWithTop | None = None


class CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class WireUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: CachedTokens | None = None


class ErrorBody(msgspec.Struct):
    message: str = ""
    code: int | None = None


class Message(msgspec.Struct):
    """A whole answer, or one server-sent event of a stream."""

    choices: list[Choice] = []
    usage: WireUsage | None = None
    error: ErrorBody | None = None


class MessageWithTop(msgspec.Struct):
    """The same where rivals were asked for."""

    choices: list[ChoiceWithTop] = []
    usage: WireUsage | None = None
    error: ErrorBody | None = None


plain_decoder = msgspec.json.Decoder(Message)
top_decoder = msgspec.json.Decoder(MessageWithTop)


def request_body(
    model: str | None, prompt_ids: Sequence[int], sampling: Sampling, request_id: str, stream: bool
) -> bytes:
    """The JSON body of a generate request."""
    # logprobs=0 is the sampled token alone; k rivals need one more place, since the sampled token takes the first
    params: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "n": sampling.n,
        "logprobs": sampling.top_logprobs + 1 if sampling.top_logprobs else 0,
    }
    if sampling.seed is not None:
        params["seed"] = sampling.seed
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    else:
        params["detokenize"] = False
    if sampling.stop_ids:
        params["stop_token_ids"] = list(sampling.stop_ids)
    if sampling.ignore_eos:
        params["ignore_eos"] = True
    body: dict[str, Any] = {
        "request_id": request_id,
        "token_ids": prompt_ids if isinstance(prompt_ids, list) else [int(token) for token in prompt_ids],
        "sampling_params": params,
        "stream": stream,
    }
    if model is not None:
        body["model"] = model
    if stream:
        body["stream_options"] = {"include_usage": True}
    return orjson.dumps(body)


def to_chunk(choice: Choice | ChoiceWithTop, top: int) -> Chunk:
    """The chunk of one choice; `top` is how many rivals were asked for.

    Raises ValueError when tokens came without their log-probabilities, which must never pass for an answer."""
    ids = choice.token_ids or []
    content = (choice.logprobs.content if choice.logprobs else None) or []
    if len(content) != len(ids):
        raise ValueError(f"{len(ids)} tokens came with {len(content)} log-probabilities")
    tops: Sequence[Sequence[tuple[int, float]]] = ()
    if isinstance(choice, ChoiceWithTop) and choice.logprobs and choice.logprobs.content:
        tops = [_rivals(position.top_logprobs, top) for position in choice.logprobs.content]
    return Chunk(
        choice.index,
        ids,
        [position.logprob for position in content],
        choice.finish_reason,
        choice.stop_reason,
        tuple(Span(span.version, span.start, span.end) for span in choice.weight_versions or ()),
        None,
        tops,
    )


def adapter_spans(spans: Sequence[Span], adapter: str) -> tuple[Span, ...]:
    """The spans of what an adapter sampled, from those of the weights under it, which must have been one base."""
    labels = {span.label for span in spans}
    sure = len(labels) == 1 and is_base(*labels)
    return tuple(Span(adapter if sure else MIXED, span.start, span.end) for span in spans)


def to_usage(usage: WireUsage) -> Usage:
    """Token counts; `cached` is 0 where the server does not say."""
    details = usage.prompt_tokens_details
    return Usage(usage.prompt_tokens, usage.completion_tokens, (details and details.cached_tokens) or 0)


def _rivals(candidates: list[Candidate], top: int) -> list[tuple[int, float]]:
    best = sorted(candidates, key=lambda candidate: -candidate.logprob)[:top]
    return [(candidate.token_id, candidate.logprob) for candidate in best]
