"""vLLM as an engine, over `POST /inference/v1/generate` (start it with `--enable-scale-out`).

vLLM 0.32 queues requests while paused and 0.33 answers 503."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec
import orjson

from millrace.infra.engines.base import Chunk, Sampling, Usage
from millrace.infra.engines.token_server import (
    GRAMMAR_FAULT,
    INTERNAL_ERROR,
    LABEL_S,
    Reader,
    TokenServer,
    explain,
    refusal,
)
from millrace.infra.engines.vllm.wire import (
    Message,
    MessageWithTop,
    plain_decoder,
    request_body,
    to_chunk,
    to_usage,
    top_decoder,
)
from millrace.infra.errors import EngineError, EngineRejected, EngineUnavailable


class VllmEngine(TokenServer):
    """Talks to one vLLM server (or to `millrace.infra.engines.inprocess.server`)."""

    kind = "vllm"
    generate_path = "/inference/v1/generate"

    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str, stream: bool = True
    ) -> AsyncGenerator[Chunk, None]:
        adapter = self.adapter
        body = request_body(adapter or self.model, prompt_ids, sampling, request_id, stream)
        chunks = self._stream(body, sampling) if stream else self._read_all(body, sampling)
        if adapter is not None:
            chunks = self._relabel(chunks, adapter)
        return chunks if sampling.grammar is None else self._guard_grammar(chunks, prompt_ids, request_id)

    async def weight_version(self) -> str:
        try:
            status, body = await self._get("/weight_info", LABEL_S)
            if status != 200:
                raise refusal(status, body, self.url)
            return str(orjson.loads(body)["weight_version"])
        except (OSError, ValueError) as error:
            raise EngineUnavailable(f"{self.url} does not tell its weight version: {explain(error)}") from error

    def _lacks_adapter(self, error: EngineRejected) -> bool:
        return error.status == 404

    async def _guard_grammar(
        self, chunks: AsyncGenerator[Chunk, None], prompt_ids: Sequence[int], request_id: str
    ) -> AsyncGenerator[Chunk, None]:
        """What is sampled under a grammar. vLLM answers 500 to one that it cannot compile, as to a fault of its own:
        where it samples a token without the grammar, that is at fault. Raises EngineRejected then."""
        is_begun = False
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    is_begun = True
                    yield chunk
        except EngineUnavailable as error:
            if is_begun or error.status != INTERNAL_ERROR or not await self._can_sample(prompt_ids, request_id):
                raise
            raise EngineRejected(GRAMMAR_FAULT, 400) from error

    async def _can_sample(self, prompt_ids: Sequence[int], request_id: str) -> bool:
        one = Sampling(1)
        body = request_body(self.adapter or self.model, prompt_ids, one, f"{request_id}-free", stream=False)
        try:
            return [chunk async for chunk in self._read_all(body, one)] != []
        except EngineError:
            return False

    def _reader(self, sampling: Sampling) -> Reader:
        return lambda data: self._parse(data, sampling)

    def _parse(self, data: bytes, sampling: Sampling) -> tuple[list[Chunk], Usage | None]:
        top, n = sampling.top_logprobs, sampling.n
        message: Message | MessageWithTop
        try:
            message = top_decoder.decode(data) if top else plain_decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise EngineUnavailable(f"{self.url} sent no JSON that we know: {error}") from error
        if message.error is not None:
            raise refusal(message.error.code or 500, data, self.url)
        try:
            chunks = [to_chunk(choice, top, n) for choice in message.choices]
        except ValueError as error:
            raise EngineUnavailable(f"{self.url} sent an answer that cannot be trained on: {error}") from error
        return chunks, None if message.usage is None else to_usage(message.usage)
