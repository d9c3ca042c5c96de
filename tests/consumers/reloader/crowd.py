"""Requests that never stop: whatever happens to an engine, some of them are running."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

from millrace.infra.engines.base import Chunk, Engine, Sampling
from millrace.schemas.labels import parse_label
from tests.support.engines import differences, join, until


class Crowd:
    """`size` clients of an engine, each of which asks again as soon as it is answered. Use as an async context manager,
    which ends when the last requests have."""

    def __init__(
        self, engine: Engine, prompt: Sequence[int], sampling: Sampling, *, size: int = 3, stream: bool = True
    ) -> None:
        self.replies: list[Chunk] = []
        self._engine, self._prompt, self._sampling, self._stream = engine, prompt, sampling, stream
        self._answered = [0] * size
        self._over = False
        self._clients: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Crowd:
        self._clients = [asyncio.create_task(self._ask(client)) for client in range(len(self._answered))]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over = True
        if kind is not None:  # an engine that was left paused would never answer
            for client in self._clients:
                client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=kind is not None)

    async def _ask(self, client: int) -> None:
        for number in count():
            if self._over:
                return
            name = f"{id(self)}-{client}-{number}"
            sampling = replace(self._sampling, seed=1000 * client + number)
            generated = self._engine.generate(self._prompt, sampling, request_id=name, stream=self._stream)
            self.replies.append(join([chunk async for chunk in generated]))
            self._answered[client] += 1

    async def round(self) -> None:
        """Wait until every client was answered once more."""
        wanted = [answered + 1 for answered in self._answered]

        def done() -> bool:
            for client in self._clients:
                if client.done():
                    client.result()  # raises what ended it
            return all(now >= then for now, then in zip(self._answered, wanted, strict=True))

        await until(done, 240)

    async def meet(self, swap: Callable[[int], Awaitable[None]]) -> None:
        """Swap to versions 1, 2, ... until one met a request that ran. A busy engine's answers come late, so at one
        swap all may have been complete. AssertionError when none of twelve met any."""
        for version in range(1, 13):
            await self.round()
            await swap(version)
            await self.round()
            if self.swapped:
                return
        raise AssertionError("no swap met a request that ran")

    @property
    def swapped(self) -> list[Chunk]:
        """Replies that more than one version sampled."""
        return [reply for reply in self.replies if len(reply.spans) > 1]


def check_versions(reply: Chunk, prompt: Sequence[int], folders: Sequence[Path], exact: float) -> None:
    """Every token has the log-probability that the version of its span gives it, and no other version's; spans cover
    the reply, versions rise (one that was replaced before it sampled a token of this reply has no span). folders:
    version n is in folders[n % len(folders)]."""
    versions = [found[1] for span in reply.spans if (found := parse_label(span.label)) is not None]
    assert versions == sorted(set(versions)), versions
    assert [span.start for span in reply.spans] == [0, *(span.end for span in reply.spans[:-1])]
    assert reply.spans[-1].end == len(reply.token_ids)
    for version, span in zip(versions, reply.spans, strict=True):
        for other, folder in enumerate(folders):
            apart = differences(folder, prompt, reply.token_ids, reply.logprobs)[span.start : span.end]
            if other == version % len(folders):
                assert max(apart) < exact
            elif len(apart) > 10:
                assert max(apart) > 1e-2, "the versions differ"
