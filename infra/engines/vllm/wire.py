"""vLLM's token-in token-out JSON (`POST /inference/v1/generate`): the subset that we send, and read back typed.

Decoding through msgspec skips every field that is not named here, which is most of what vLLM sends per token. None of
these values refers to itself, so the garbage collector need not look at the thousands of them (`gc=False`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import orjson

from millrace.infra.engines.base import Chunk, LabelSpan, Sampling, Usage
from millrace.schemas.bounds import NAME_BYTES

LARGEST_ID = 2**31 - 1
TokenId = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_ID)]


class LikelyToken(msgspec.Struct, gc=False):
    """One token with its log-probability; rank 1 is the most likely."""

    token_id: int
    logprob: float
    rank: int | None = None


class Position(msgspec.Struct, gc=False):
    """The sampled token of one position."""

    logprob: float


class PositionWithTop(msgspec.Struct, gc=False):
    """The sampled token of one position and its rivals."""

    logprob: float
    top_logprobs: list[LikelyToken] = []


class Logprobs(msgspec.Struct, gc=False):
    content: list[Position] | None = None


class LogprobsWithTop(msgspec.Struct, gc=False):
    content: list[PositionWithTop] | None = None


class VersionSpan(msgspec.Struct, gc=False):
    version: str
    start: int
    end: int


class WireChoice(msgspec.Struct, gc=False):
    index: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[TokenId] | None = None
    weight_versions: list[VersionSpan] | None = None
    logprobs: Logprobs | None = None


class ChoiceWithTop(msgspec.Struct, gc=False):
    index: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[TokenId] | None = None
    weight_versions: list[VersionSpan] | None = None
    logprobs: LogprobsWithTop | None = None


class CachedTokens(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class WireUsage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: CachedTokens | None = None


class ErrorBody(msgspec.Struct, gc=False):
    message: str = ""
    code: int | None = None


class Message(msgspec.Struct, gc=False):
    """A whole answer, or one server-sent event of a stream."""

    choices: list[WireChoice] = []
    usage: WireUsage | None = None
    error: ErrorBody | None = None


class MessageWithTop(msgspec.Struct, gc=False):
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
    if sampling.is_biased:
        params |= {
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repetition_penalty": sampling.repetition_penalty,
            "min_p": sampling.min_p,
        }
        if sampling.logit_bias:
            params["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    body: dict[str, Any] = {
        "request_id": request_id,
        "token_ids": prompt_ids if isinstance(prompt_ids, list) else [int(token) for token in prompt_ids],
        "sampling_params": params,
        "stream": stream,
    }
    if sampling.grammar is not None:
        params["structured_outputs"] = {sampling.grammar.kind: sampling.grammar.text}
        # The grammar says where thoughts may stand: no parser of vLLM's own is to wait for their end.
        body["reasoning_ended"] = True
    if model is not None:
        body["model"] = model
    if stream:
        body["stream_options"] = {"include_usage": True}
    return orjson.dumps(body)


def to_chunk(choice: WireChoice | ChoiceWithTop, top: int, n: int) -> Chunk:
    """The chunk of one of `n` choices; `top` is how many rivals were asked for.

    Raises ValueError for what must never pass for an answer: tokens without their log-probabilities, a choice that
    nobody asked for, names that no record takes."""
    ids = choice.token_ids or []
    content = choice.logprobs.content or () if choice.logprobs is not None else ()
    if not 0 <= choice.index < n:
        raise ValueError(f"choice {choice.index} of {n}")
    if len(content) != len(ids):
        raise ValueError(f"{len(ids)} tokens came with {len(content)} log-probabilities")
    if choice.finish_reason is None and choice.stop_reason is None and choice.weight_versions is None:
        spans: tuple[LabelSpan, ...] = ()  # as in all events of a stream but the last
    else:
        spans = tuple(LabelSpan(span.version, span.start, span.end) for span in choice.weight_versions or ())
        names = [choice.finish_reason, choice.stop_reason, *(span.label for span in spans)]
        longest = max((len(name.encode()) for name in names if isinstance(name, str)), default=0)
        if longest > NAME_BYTES:
            raise ValueError(f"a name of {longest} bytes, of at most {NAME_BYTES}")
    tops: Sequence[Sequence[tuple[int, float]]] = ()
    if top and isinstance(choice, ChoiceWithTop) and choice.logprobs and choice.logprobs.content:
        tops = [_rivals(position.top_logprobs, top) for position in choice.logprobs.content]
    return Chunk(
        choice.index,
        ids,
        [position.logprob for position in content],
        choice.finish_reason,
        choice.stop_reason,
        spans,
        None,
        tops,
    )


def to_usage(usage: WireUsage) -> Usage:
    """Token counts; `cached` is 0 where the server does not say."""
    details = usage.prompt_tokens_details
    return Usage(usage.prompt_tokens, usage.completion_tokens, (details and details.cached_tokens) or 0)


def _rivals(candidates: list[LikelyToken], top: int) -> list[tuple[int, float]]:
    valid = [candidate for candidate in candidates if 0 <= candidate.token_id <= LARGEST_ID]
    best = sorted(valid, key=lambda candidate: -candidate.logprob)[:top]
    return [(candidate.token_id, candidate.logprob) for candidate in best]
