"""How an engine is to sample what was asked: the request's own words, then its session's defaults, then ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace.dialects.conversation import Ask
from millrace.dialects.errors import ApiError, bad_request
from millrace.infra.engines.base import Grammar, Sampling
from millrace.infra.errors import EngineRejected
from millrace.schemas import bounds
from millrace.schemas.records import Sampling as SamplingRecord


def to_sampling(ask: Ask, defaults: Mapping[str, Any], room: int, grammar: Grammar | None = None) -> Sampling:
    """How to sample; a session's `defaults` fill what the request leaves open, `room` is what the context has left; the
    reply is held to `grammar`.

    Raises ApiError 400 when the prompt fills the context, and for values that no engine takes."""
    if room < 1:
        raise too_long(ask.asked_in)
    asked_tokens = min(ask.max_tokens, room) if ask.fitted and ask.max_tokens is not None else ask.max_tokens

    usual_tokens = room if ask.usual_tokens is None else ask.usual_tokens

    def pick(value: Any, name: str, default: Any) -> Any:
        return value if value is not None else defaults.get(name, default)

    if ask.logprobs:  # where nobody says how many tokens, as many as may have log-probabilities
        usual_tokens = min(usual_tokens, max(1, bounds.LOGPROBS // (ask.n * (1 + ask.top_logprobs))))

    try:
        sampling = Sampling(
            max_tokens=asked_tokens
            if asked_tokens is not None
            else min(int(defaults.get("max_tokens", usual_tokens)), room),
            temperature=float(pick(ask.temperature, "temperature", 1.0)),
            top_p=float(pick(ask.top_p, "top_p", 1.0)),
            top_k=int(pick(ask.top_k, "top_k", 0)),
            seed=pick(ask.seed, "seed", None),
            stop=ask.stop,
            n=ask.n,
            top_logprobs=ask.top_logprobs,
            presence_penalty=ask.presence_penalty,
            frequency_penalty=ask.frequency_penalty,
            repetition_penalty=ask.repetition_penalty,
            min_p=ask.min_p,
            logit_bias=ask.logit_bias,
            grammar=grammar,
        )
    except EngineRejected as error:
        param = str(error).partition(" ")[0]
        is_field = param in Sampling.__dataclass_fields__
        raise bad_request(str(error), param=param if is_field else None, code="engine_rejected") from error
    count = sampling.n * min(sampling.max_tokens, room) * (1 + sampling.top_logprobs)
    if ask.logprobs and count > bounds.LOGPROBS:
        raise bad_request(
            f"logprobs: {count} log-probabilities are more than {bounds.LOGPROBS}: lower max_tokens, n or top_logprobs",
            param="logprobs",
        )
    return sampling


def too_long(asked_in: str) -> ApiError:
    """The refusal of a prompt, in this field of its request, that leaves no room for a reply."""
    message = "The conversation is longer than the model's context"
    return bad_request(message, param=asked_in, code="context_length_exceeded")


def record_of(sampling: Sampling) -> SamplingRecord:
    """How tokens were drawn, as records have it."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens,
        "seed": sampling.seed,
        "stop": list(sampling.stop),
        "n": sampling.n,
    }
