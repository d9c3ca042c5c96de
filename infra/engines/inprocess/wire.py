"""Bodies that the in-process engine's server and its control exchange, and vLLM's of a request for tokens. Pure."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from millrace.infra.engines.base import Chunk, Grammar, Sampling
from millrace.infra.engines.control import PauseMode


class Params(msgspec.Struct):
    """`sampling_params` as vLLM names them."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    n: int = 1
    seed: int | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    logit_bias: dict[int, float] = {}
    structured_outputs: dict[Literal["json", "structural_tag"], str] = {}


class GenerateBody(msgspec.Struct):
    """A generate request."""

    token_ids: list[int]
    sampling_params: Params
    model: str | None = None
    request_id: str = ""
    stream: bool = False


class ServerState(msgspec.Struct):
    """`GET /state`. incarnation: which start of the process it is; receives: whether it takes broadcasts; running,
    waiting: choices that are sampled, and that wait; tokens: how many were sampled since the start."""

    incarnation: str
    label: str
    paused: bool
    receives: bool
    running: int | None = None
    waiting: int = 0
    tokens: int = 0


class Pause(msgspec.Struct):
    """`POST /pause`."""

    mode: PauseMode


class Load(msgspec.Struct):
    """`POST /load`: the weights of a directory."""

    folder: str


class Label(msgspec.Struct):
    """`POST /label`: of the tokens that are sampled from now on."""

    label: str


class Abort(msgspec.Struct):
    """`POST /abort`: these requests, or all."""

    request_ids: list[str] = []


class Receive(msgspec.Struct):
    """`POST /receive`: `group` and `announced` as `millrace.consumers.reloader.receiving` has them."""

    group: dict[str, Any]
    announced: dict[str, str]


class AbortCount(msgspec.Struct):
    """The answer to `POST /abort`: how many choices were ended."""

    count: int


def sampling(params: Params) -> Sampling:
    """What the engine is asked for."""
    stop = [params.stop] if isinstance(params.stop, str) else params.stop or []
    return Sampling(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        seed=params.seed,
        stop=tuple(stop),
        stop_ids=tuple(params.stop_token_ids),
        n=params.n,
        ignore_eos=params.ignore_eos,
        top_logprobs=min(params.logprobs or 0, 19),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        min_p=params.min_p,
        logit_bias=tuple(params.logit_bias.items()),
        grammar=next((Grammar(kind, text) for kind, text in params.structured_outputs.items()), None),
    )


def choice(chunk: Chunk) -> dict[str, Any]:
    """A chunk as vLLM writes it: the sampled token stands first among its rivals."""
    content = []
    for position, (token, logprob) in enumerate(zip(chunk.token_ids, chunk.logprobs, strict=True)):
        rivals = [{"token_id": token, "logprob": logprob}]
        if chunk.tops:
            rivals += [{"token_id": rival, "logprob": value} for rival, value in chunk.tops[position] if rival != token]
        content.append({"token_id": token, "logprob": logprob, "top_logprobs": rivals})
    spans = [{"version": span.label, "start": span.start, "end": span.end} for span in chunk.spans]
    return {
        "index": chunk.index,
        "finish_reason": chunk.finish_reason,
        "stop_reason": chunk.stop_reason,
        "token_ids": chunk.token_ids,
        "weight_versions": spans if chunk.finish_reason else None,
        "logprobs": {"content": content},
    }


def usage_of(chunk: Chunk) -> dict[str, int] | None:
    """The `usage` that a last chunk has."""
    if chunk.usage is None:
        return None
    prompt, completion, _ = chunk.usage
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
