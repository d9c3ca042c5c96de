"""What a reloader needs of an engine: stop sampling, change the weights, say which, go on.

Invariants that every sibling keeps: every call may be repeated; a call that returns has taken effect; `load` that
raises leaves the weights undefined, so that a good load must follow before anything is sampled.
`tests/infra/engines/test_conformance.py` holds them to it."""

from __future__ import annotations

import base64
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import httpx
from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_exponential

from millrace.infra.engines.bearer import UNAUTHORIZED_STATUS, Bearer, Key
from millrace.infra.errors import EngineError, EngineRejected, EngineTimeout, EngineUnavailable

PauseMode = Literal["abort", "wait", "keep"]
JOIN_S = 60.0
"""how long the ranks of a broadcast wait for each other"""
IDLE_S = 2.0
"""engines close idle connections, vLLM after 5 s"""


@dataclass(frozen=True, slots=True)
class EngineState:
    """One look at an engine: which start of it, the label of what it serves, whether sampling is paused; where that is
    an adapter, the label of the base under it."""

    incarnation: str
    label: str
    paused: bool
    base: str = ""


class EngineLoad(NamedTuple):
    """What an engine has to do: requests that it samples, and that wait in it; the free share of its key-value cache, 0
    to 1, and the tokens a second that it sampled of late, None where it does not say."""

    running: int
    waiting: int
    free_cache: float | None = None
    tokens_s: float | None = None


class TokenRate:
    """Tokens a second, from looks at a counter of them."""

    def __init__(self) -> None:
        self._look: tuple[float, float] | None = None

    def since_last(self, count: float) -> float | None:
        """Of the time since the last look; None at the first, and where the counter began anew."""
        now, former = time.monotonic(), self._look
        self._look = now, count
        if former is None or count < former[1] or now <= former[0]:
            return None
        return (count - former[1]) / (now - former[0])


@dataclass(frozen=True, slots=True)
class Broadcast:
    """A group that waits for an engine: its store's address, how many ranks the engine has in it (the sender is rank 0,
    they follow), the first bytes of the weight file and the sha256 hex of all of it."""

    host: str
    port: int
    ranks: int
    header: bytes
    digest: str

    @property
    def group(self) -> dict[str, object]:
        """The group, as the function named by `RECEIVER` of `kind.py` takes it."""
        return {"host": self.host, "port": self.port, "ranks": self.ranks, "timeout_s": JOIN_S}

    @property
    def notice(self) -> dict[str, str]:
        """The file that comes, as the same function takes it."""
        return {"header": base64.b64encode(self.header).decode(), "digest": self.digest}


class EngineControl(ABC):
    """The control side of one engine. Every method may raise EngineUnavailable (it does not answer) and EngineTimeout,
    the changing ones also EngineRejected (4xx) and EngineError (it tried and failed)."""

    url: str

    @abstractmethod
    async def state(self) -> EngineState:
        """Look at it. A restarted engine has another incarnation."""

    async def occupancy(self) -> EngineLoad | None:
        """What it has to do now; None where it does not say."""
        return None

    @abstractmethod
    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling: requests in flight freeze (keep), end with what they have (abort) or finish first (wait)."""

    @abstractmethod
    async def resume(self) -> None:
        """Go on sampling."""

    async def refusal(self, folder: Path) -> str | None:
        """Why this engine must not be given this directory, None: it may be. Changes nothing."""
        return None

    @abstractmethod
    async def load(self, folder: Path) -> None:
        """Replace the weights by those of a Hugging Face directory on a disk that the engine sees."""

    async def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that it serves."""
        return ()

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Serve the adapter in `folder` as `name`, beside the others. A failure changes nothing."""
        raise EngineRejected(f"{self.url} serves no adapters: publish versions merged, or use another kind", 400)

    async def unload_adapter(self, name: str) -> None:
        """Take no more requests for `name`; those under way end with it."""
        raise EngineRejected(f"{self.url} has no adapter {name}", 404)

    async def ranks(self) -> int:
        """How many workers receive a broadcast. Raises EngineRejected when the engine takes none."""
        raise EngineRejected(f"{self.url} takes no broadcasts", 404)

    async def receive(self, offer: Broadcast) -> None:
        """Replace the weights by those that a sender broadcasts, their sha256 checked before anything is changed.
        After an EngineError the weights are undefined, as after that of `load`."""
        raise EngineRejected(f"{self.url} takes no broadcasts", 404)

    @abstractmethod
    async def set_version(self, label: str) -> None:
        """Stamp tokens sampled from now on with `label`."""

    @abstractmethod
    async def reset_prefix_cache(self) -> bool:
        """Forget every cached key, those of frozen requests included (they are computed again). False: it did not."""

    @abstractmethod
    async def abort(self, request_ids: Sequence[str] = ()) -> int:
        """End these requests, or all, with what they have. Returns how many that were."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of every resource. Idempotent."""


class HttpControl(EngineControl):
    """A control over HTTP of the engine at `url`, which may ask for a `key`. `load_timeout_s` bounds one load,
    `timeout_s` every other call."""

    def __init__(self, url: str, *, key: Key = "", timeout_s: float = 30.0, load_timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self._bearer = Bearer(key)
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers=self._bearer.headers,
            timeout=timeout_s,
            limits=httpx.Limits(keepalive_expiry=IDLE_S),
        )
        self._load_timeout_s = load_timeout_s

    async def close(self) -> None:
        await self._client.aclose()

    def _broke(self) -> None:
        """A call was not answered: the engine may be another start of it when it answers again."""

    @retry(
        retry=retry_if_exception_type(EngineUnavailable),
        stop=stop_after_attempt(3),
        wait=wait_exponential(0.05),
        reraise=True,
    )
    async def _call(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        """The answer, status 200. A connection that broke is tried again: every call may be repeated."""
        try:
            key = self._bearer.key
            answer = await self._client.request(method, path, **arguments)
            if answer.status_code == UNAUTHORIZED_STATUS and self._bearer.renew(key):
                self._client.headers.update(self._bearer.headers)
                answer = await self._client.request(method, path, **arguments)
        except httpx.TimeoutException as error:
            self._broke()
            raise EngineTimeout(f"{self.url}{path} did not answer in time") from error
        except httpx.TransportError as error:
            self._broke()
            raise EngineUnavailable(f"{self.url}{path} does not answer: {error or type(error).__name__}") from error
        if answer.status_code == 200:
            return answer
        message = f"{self.url}{path} answered {answer.status_code}: {answer.text[:500]}"
        if answer.status_code < 500:
            raise EngineRejected(message, answer.status_code)
        raise EngineError(message)
