"""SGLang as an engine, over `POST /generate`.

Invariant: nothing is sampled by a server without our plugin (`worker`): its log-probabilities would be other ones, in
silence. So a server is asked for it before its first request, and again after nothing listened there."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from millrace.infra.engines.base import Chunk, Sampling
from millrace.infra.engines.bearer import UNAUTHORIZED_STATUS
from millrace.infra.engines.http_client import HttpAnswer
from millrace.infra.engines.sglang.wire import AnswerReader, read_notice, request_body
from millrace.infra.engines.sglang.worker import STATE
from millrace.infra.engines.token_server import (
    GRAMMAR_FAULT,
    INTERNAL_ERROR,
    LABEL_S,
    EngineAbsent,
    Reader,
    TokenServer,
    explain,
)
from millrace.infra.errors import EngineRejected, EngineUnavailable

GRAMMAR_TOKEN = "accept_token"
"""in what SGLang says of a token that a grammar does not allow"""


class SglangEngine(TokenServer):
    """Talks to one SGLang server in whose environment Millrace is installed."""

    kind = "sglang"
    generate_path = "/generate"
    _is_known = False
    """whether the server is one that we can train on"""

    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str, stream: bool = True
    ) -> AsyncGenerator[Chunk, None]:
        adapter = self.adapter
        body = request_body(adapter, prompt_ids, sampling, request_id, stream)
        chunks = self._stream(body, sampling) if stream else self._read_all(body, sampling)
        if adapter is not None:
            chunks = self._relabel(chunks, adapter)
        return chunks if sampling.grammar is None else self._guard_grammar(chunks)

    async def weight_version(self) -> str:
        try:
            return read_notice(*await self._get(STATE, LABEL_S), self.url).label
        except (OSError, ValueError) as error:
            raise EngineUnavailable(f"{self.url} does not tell its weight version: {explain(error)}") from error

    async def _guard_grammar(self, chunks: AsyncGenerator[Chunk, None]) -> AsyncGenerator[Chunk, None]:
        """What is sampled under a grammar. One that allows no token at all is at fault, where SGLang fails at the token
        that it drew nevertheless. Raises EngineRejected then."""
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk
        except EngineUnavailable as error:
            if error.status == INTERNAL_ERROR and GRAMMAR_TOKEN in str(error):
                raise EngineRejected(GRAMMAR_FAULT, 400) from error
            raise

    def _reader(self, sampling: Sampling) -> Reader:
        return AnswerReader(sampling, self.url)

    def _lacks_adapter(self, error: EngineRejected) -> bool:
        return error.status == 400 and "LoRA" in str(error)

    async def _post(self, body: bytes) -> HttpAnswer:
        if not self._is_known:
            try:
                status, answer = await self._get(STATE, LABEL_S)
            except (OSError, ValueError) as error:
                text = f"cannot connect to {self.url}: {explain(error)}; is the engine up?"
                raise EngineAbsent(text, status=503) from error
            if status != UNAUTHORIZED_STATUS:  # else the request itself is refused, and comes again with another key
                read_notice(status, answer, self.url)
                self._is_known = True
        try:
            return await super()._post(body)
        except EngineUnavailable:
            self._is_known = False
            raise
