"""SGLang's token-in token-out JSON (`POST /generate`), and what our plugin says of a server: the subset that we send,
and read back typed.

A request is a batch of its choices, each with a seed of its own: SGLang's `n` would give all choices of a seed the same
tokens. A stream has events of the choices in any order, each with all tokens so far or, with
`--incremental-streaming-output`, the new ones; both are read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from secrets import token_hex
from typing import Annotated, Any

import msgspec
import orjson

from millrace.infra.engines.base import Chunk, LabelSpan, Sampling, Usage
from millrace.infra.engines.bearer import UNAUTHORIZED_STATUS
from millrace.infra.engines.resubmit import seed_after
from millrace.infra.engines.token_server import GRAMMAR_FAULT, refusal
from millrace.infra.errors import EngineRejected, EngineUnavailable
from millrace.schemas.bounds import NAME_BYTES
from millrace.schemas.labels import MIXED

LARGEST_ID = 2**31 - 1
OLDEST, NEXT = (0, 5, 21), (0, 6)
"""SGLang's versions from and below which its routes are those that we know"""
BATCH_PLACE = "/{}-{}."
"""behind a request's id, for a choice and for the time it is asked for: SGLang ends what bears the id of a stream that
ended 2 s ago, and takes an id for all that begin with it"""

OutputId = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_ID)]
TokenScore = tuple[float | None, OutputId, str | None]
"""log-probability, token id, text"""


class ServerNotice(msgspec.Struct):
    """`GET /millrace`. incarnation: which start it is; ranks: processes of one replica of the model; adapters: None
    where it serves none."""

    sglang: str
    incarnation: str
    label: str
    is_paused: bool
    model_type: str
    ranks: int
    replicas: int
    adapters: list[str] | None = None


class Ending(msgspec.Struct, gc=False):
    """Why a choice ended. match: the token id or string of a stop; status_code: of a failure."""

    type: str
    match: int | str | list[int] | None = msgspec.field(default=None, name="matched")
    message: str | None = None
    status_code: int | None = None


class LabelledRange(msgspec.Struct, gc=False):
    version: str
    start: int
    end: int


class ItemMeta(msgspec.Struct, gc=False):
    finish_reason: Ending | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    weight_versions: list[LabelledRange] = []
    output_token_logprobs: list[TokenScore] = []
    output_top_logprobs: list[list[TokenScore] | None] = []


class Fault(msgspec.Struct, gc=False):
    message: str = ""
    code: int | None = None


class BatchItem(msgspec.Struct, gc=False):
    """One choice, or news of it."""

    meta_info: ItemMeta = msgspec.field(default_factory=ItemMeta)
    output_ids: list[OutputId] = []
    index: int = 0
    error: Fault | None = None


_event = msgspec.json.Decoder(BatchItem)
_whole = msgspec.json.Decoder(list[BatchItem])
_notice = msgspec.json.Decoder(ServerNotice)


def read_notice(status: int, body: bytes, url: str) -> ServerNotice:
    """What the server at `url` says of itself. Raises EngineUnavailable, with what to do, where it cannot be used."""
    if status == UNAUTHORIZED_STATUS:
        raise EngineUnavailable(f"{url} asks for another key than [engine] key", status=503)
    if status != 200:
        raise EngineUnavailable(
            f"{url} is no SGLang that Millrace can train on ({status}): install Millrace in its environment too (pip "
            "install --no-deps), which makes its log-probabilities and seeds right, and start it again",
            status=503,
        )
    try:
        notice = _notice.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EngineUnavailable(f"{url} is another version of Millrace's plugin for SGLang: {error}") from error
    if not OLDEST <= tuple(int(number) for number in re.findall(r"[0-9]{1,9}", notice.sglang)[:3]) < NEXT:
        oldest = ".".join(map(str, OLDEST))
        raise EngineUnavailable(f"{url} is SGLang {notice.sglang}: Millrace knows {oldest} and later, below 0.6")
    return notice


def request_body(
    adapter: str | None, prompt_ids: Sequence[int], sampling: Sampling, request_id: str, stream: bool
) -> bytes:
    """The JSON body of a generate request."""
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
    }
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.stop_ids:
        params["stop_token_ids"] = list(sampling.stop_ids)
    if sampling.ignore_eos:
        params["ignore_eos"] = True
    if sampling.is_biased:
        params |= {
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repetition_penalty": sampling.repetition_penalty,
        }
        if sampling.logit_bias:
            params["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.grammar is not None:
        name = "json_schema" if sampling.grammar.kind == "json" else sampling.grammar.kind
        params[name] = sampling.grammar.text
    ids = prompt_ids if isinstance(prompt_ids, list) else [int(token) for token in prompt_ids]
    choices, nonce = range(sampling.n), token_hex(4)
    body: dict[str, Any] = {
        "rid": [request_id + BATCH_PLACE.format(index, nonce) for index in choices],
        "input_ids": [ids] * sampling.n,
        "sampling_params": [
            params if sampling.seed is None else {**params, "sampling_seed": seed_after(sampling.seed, index)}
            for index in choices
        ],
        "return_logprob": True,
        "top_logprobs_num": sampling.top_logprobs,
        "stream": stream,
    }
    if adapter is not None:
        body["lora_path"] = [adapter] * sampling.n
    return orjson.dumps(body)


class AnswerReader:
    """Reads the answer to one request for `sampling` from the server at `url`."""

    def __init__(self, sampling: Sampling, url: str) -> None:
        self._sampling = sampling
        self._url = url
        self._lengths = [0] * sampling.n
        self._ends = 0
        self._prompt = self._cached = 0

    def __call__(self, data: bytes) -> tuple[list[Chunk], Usage | None]:
        try:
            items = _whole.decode(data) if data.startswith(b"[") else [_event.decode(data)]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise EngineUnavailable(f"{self._url} sent no JSON that we know: {error}") from error
        if len(items) > 1:
            for index, item in enumerate(items):
                item.index = index
        try:
            chunks = [self._chunk(item, data) for item in items]
        except ValueError as error:
            raise EngineUnavailable(f"{self._url} sent an answer that cannot be trained on: {error}") from error
        is_end = self._ends == self._sampling.n
        return chunks, Usage(self._prompt, sum(self._lengths), self._cached) if is_end else None

    def _chunk(self, item: BatchItem, data: bytes) -> Chunk:
        """What is new of a choice. Raises ValueError for what must never pass for an answer: tokens without their
        log-probabilities, a choice that nobody asked for, names that no record takes; EngineRejected and
        EngineUnavailable for a failure."""
        if item.error is not None:
            raise refusal(item.error.code or 400, data, self._url)
        meta, sampling = item.meta_info, self._sampling
        ending = meta.finish_reason
        if ending is not None and ending.status_code is not None:
            message = orjson.dumps({"error": {"message": ending.message}})
            raise refusal(ending.status_code, message, self._url)
        if not 0 <= item.index < sampling.n:
            raise ValueError(f"choice {item.index} of {sampling.n}")
        length = self._lengths[item.index]
        count = meta.completion_tokens - length if item.output_ids else 0
        ids = item.output_ids[len(item.output_ids) - count :]
        scores = meta.output_token_logprobs[len(meta.output_token_logprobs) - count :]
        if not 0 <= count == len(ids) == len(scores) or [token for _, token, _ in scores] != ids:
            raise ValueError(f"{count} tokens came as {len(ids)}, with {len(scores)} log-probabilities")
        logprobs = [logprob for logprob, _, _ in scores if logprob is not None]
        if len(logprobs) != count:
            if sampling.grammar is not None:
                raise EngineRejected(GRAMMAR_FAULT, 400)  # it allows no token
            raise ValueError("a token came without its log-probability")
        self._lengths[item.index] = length + count
        tops: Sequence[Sequence[tuple[int, float]]] = ()
        if sampling.top_logprobs:
            places = meta.output_top_logprobs[len(meta.output_top_logprobs) - count :]
            tops = [_rivals(place or [], sampling.top_logprobs) for place in places]
        if ending is None:
            return Chunk(item.index, ids, logprobs, tops=tops)
        self._ends += 1
        self._prompt, self._cached = meta.prompt_tokens, max(self._cached, meta.cached_tokens)
        match = ending.match
        reason = match if isinstance(match, str) or match in sampling.stop_ids else None
        assert not isinstance(reason, list)
        spans = tuple(LabelSpan(span.version, span.start, span.end) for span in meta.weight_versions)
        if (spans[-1].end if spans else 0) != length + count:
            # one that was ended in the queue comes without them: what sampled its tokens is not known any more
            spans = (LabelSpan(MIXED, 0, length + count),) if length + count else ()
        for name in (ending.type, reason, *(span.label for span in spans)):
            if isinstance(name, str) and len(name.encode()) > NAME_BYTES:
                raise ValueError(f"a name of {len(name.encode())} bytes, of at most {NAME_BYTES}")
        return Chunk(item.index, ids, logprobs, ending.type, reason, spans, None, tops)


def _rivals(place: list[TokenScore], top: int) -> list[tuple[int, float]]:
    valid = [(token, logprob) for logprob, token, _ in place if logprob is not None]
    return sorted(valid, key=lambda rival: -rival[1])[:top]
