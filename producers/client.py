"""Tell the gateway what an agent does and how it went, from the agent's own code.

    with Session.start("http://127.0.0.1:8900/v1", task_id="t1") as session:
        client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
        ...
        session.tool_result("call_1", "add", "7")
        session.reward(1.0, source="unit-tests")

Inside a rollout the episode is there already: `Session.attach(base_url, api_key)`, which does not end it. Both classes
say the same things: `Session` at once, `AsyncSession` when awaited. Leaving the block ends the session, as failed when
an exception leaves it. In the block, tools report to the session (`millrace.tool`); its end waits for what they said.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, overload

import aiohttp
import httpx
import orjson
from tenacity import AsyncRetrying, Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from millrace.infra.errors import GatewayError
from millrace.producers.intake.conversation import Owner
from millrace.producers.reports import REPORTS
from millrace.producers.session_keys import session_id
from millrace.producers.tools import SideEffect, decorate, enter, leave
from millrace.schemas.records import ToolStatus

R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
Json = dict[str, Any]

TIMEOUT_S = 30.0
ATTEMPTS = 4


class GatewayUnreachable(GatewayError):
    """The gateway did not answer, or not as a gateway: is it up?"""


class GatewayRefused(GatewayError):
    """The gateway refused. `status` is the HTTP status, `code` its code."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Speaker(ABC, Generic[R]):
    """What can be said about an episode. `R` is what a method returns: the answer, or an awaitable of it."""

    base_url: str
    api_key: str
    id: str
    judge_key: str | None = None
    """key under which rewards are sent; None: the session's own, which speaks for the source `agent` alone"""

    @abstractmethod
    def _send(self, path: str, body: Json, *, may_repeat: bool) -> R:
        """POST to a path of the session; `may_repeat`: whether it may be sent twice."""

    def tool_call(self, call_id: str, name: str, arguments: str | Mapping[str, Any] = "{}") -> R:
        """The agent asks a tool."""
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return self._event(kind="tool_call", call_id=call_id, name=name, arguments=text)

    def tool_result(
        self,
        call_id: str,
        name: str,
        content: str,
        *,
        status: ToolStatus = "ok",
        latency_us: int = 0,
        tool_version: str | None = None,
        side_effect: SideEffect | None = None,
    ) -> R:
        """A tool answered. `side_effect`: what that changed in the world."""
        result = {"call_id": call_id, "name": name, "content": content, "status": status, "latency_us": latency_us}
        return self._event(kind="tool_result", **result, tool_version=tool_version, side_effect=side_effect)

    def observation(self, content: str, *, media_type: str = "text/plain", origin: str = "") -> R:
        """The agent saw something that is no tool result."""
        return self._event(kind="observation", content=content, media_type=media_type, origin=origin)

    def internal_state(
        self,
        summary: str,
        *,
        plan_step: str | None = None,
        confidence: float | None = None,
        injected: Sequence[Mapping[str, str]] = (),
    ) -> R:
        """What the agent held in mind, in short. `injected`: what entered its context, as kind, id and version."""
        state = {"summary": summary, "plan_step": plan_step, "confidence": confidence}
        return self._event(kind="internal_state", **state, injected=list(injected))

    def feedback(
        self,
        *,
        response_id: str | None = None,
        rating: float | None = None,
        label: str | None = None,
        text: str | None = None,
    ) -> R:
        """What a person said about a reply."""
        return self._event(kind="user_feedback", response_id=response_id, rating=rating, label=label, text=text)

    def security(self, classification: str, labels: Sequence[str] = (), scopes: Sequence[str] = ()) -> R:
        """Labels for everything of this episode from here on."""
        return self._event(
            kind="security_label", classification=classification, labels=list(labels), scopes=list(scopes)
        )

    def reward(
        self,
        value: float | None,
        *,
        source: str = "agent",
        response_id: str | None = None,
        reward_id: str | None = None,
        **more: Any,
    ) -> R:
        """Judge the episode, or one reply. `more`: components, label, critique, supersedes, signal, ...

        A session that was started here judges with the key that started it; an attached one holds the session's own
        key only, which may say what the agent thinks of itself and nothing in anyone else's name."""
        body = {"value": value, "source": source, "response_id": response_id, "reward_id": reward_id, **more}
        return self._send("reward", body, may_repeat=reward_id is not None)

    def end(
        self,
        status: str = "completed",
        *,
        stop_condition: str = "agent",
        output: str | None = None,
        reason: str | None = None,
    ) -> R:
        """The episode is over. Saying so twice does no harm."""
        body = {"status": status, "stop_condition": stop_condition, "output": output, "reason": reason}
        return self._send("end", body, may_repeat=True)

    @overload
    def tool(self, function: F, /) -> F: ...
    @overload
    def tool(
        self,
        /,
        *,
        name: str | None = None,
        version: str | None = None,
        side_effect: SideEffect | None = None,
        call_id: str | None = None,
        leave_out: Collection[str] = (),
    ) -> Callable[[F], F]: ...
    def tool(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        version: str | None = None,
        side_effect: SideEffect | None = None,
        call_id: str | None = None,
        leave_out: Collection[str] = (),
    ) -> Any:
        """`millrace.tool`, reporting to this session from whatever thread or task."""
        return decorate(function, self._owner, name, version, side_effect, call_id, leave_out)

    @contextmanager
    def active(self) -> Iterator[Self]:
        """In this block tools report to this session. For threads, which do not have it from the code that makes
        them; it ends nothing."""
        mark = object()
        enter(mark, self._owner)
        try:
            yield self
        finally:
            leave(mark)

    @property
    def lost(self) -> int:
        """Reports of tools in this process that never reach this gateway."""
        return REPORTS.lost(self.base_url)

    @property
    def _owner(self) -> Owner:
        return Owner(self.api_key, self.base_url)

    def _key(self, path: str) -> str:
        return self.api_key if path != "reward" or self.judge_key is None else self.judge_key

    def _event(self, **event: Any) -> R:
        return self._send("events", {"events": [event]}, may_repeat=False)


class Session(Speaker[Json]):
    """One episode, from synchronous code."""

    def __init__(self, base_url: str, api_key: str, *, owned: bool = False) -> None:
        self.base_url, self.api_key, self.owned = base_url.rstrip("/"), api_key, owned
        self.id = session_id(api_key)
        self._http = httpx.Client(timeout=TIMEOUT_S)

    @classmethod
    def start(cls, base_url: str, api_key: str = "", **fields: Any) -> Session:
        """Begin an episode. `fields`: task_id, task, group, awaits, split, ... as `POST /v1/sessions` takes them."""
        with httpx.Client(timeout=TIMEOUT_S) as http:
            reply = _post(http, f"{base_url.rstrip('/')}/sessions", api_key, fields, may_repeat="attempt" in fields)
        session = cls(base_url, reply["api_key"], owned=True)
        session.judge_key = api_key
        return session

    @classmethod
    def attach(cls, base_url: str, api_key: str) -> Session:
        """The episode that a session key belongs to."""
        return cls(base_url, api_key)

    def close(self) -> None:
        """Let go of the connection; ends nothing."""
        REPORTS.flush(self.base_url)
        self._http.close()

    def __enter__(self) -> Self:
        enter(self, self._owner)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        leave(self)
        if self.owned:
            self.end(**_verdict(error))
        self.close()

    def _send(self, path: str, body: Json, *, may_repeat: bool) -> Json:
        if path == "end":
            REPORTS.flush(self.base_url)
        return _post(
            self._http, f"{self.base_url}/sessions/{self.id}/{path}", self._key(path), body, may_repeat=may_repeat
        )


class AsyncSession(Speaker[Awaitable[Json]]):
    """One episode, from asynchronous code. Several may share one `http` session."""

    def __init__(
        self, base_url: str, api_key: str, *, owned: bool = False, http: aiohttp.ClientSession | None = None
    ) -> None:
        self.base_url, self.api_key, self.owned = base_url.rstrip("/"), api_key, owned
        self.id = session_id(api_key)
        self._http, self._own_http = http or aiohttp.ClientSession(), http is None

    @classmethod
    async def start(
        cls, base_url: str, api_key: str = "", *, http: aiohttp.ClientSession | None = None, **fields: Any
    ) -> AsyncSession:
        """Begin an episode. `fields` as `POST /v1/sessions` takes them."""
        url, may_repeat = f"{base_url.rstrip('/')}/sessions", "attempt" in fields
        if http is not None:
            reply = await _apost(http, url, api_key, fields, may_repeat=may_repeat)
        else:
            async with aiohttp.ClientSession() as client:
                reply = await _apost(client, url, api_key, fields, may_repeat=may_repeat)
        session = cls(base_url, reply["api_key"], owned=True, http=http)
        session.judge_key = api_key
        return session

    @classmethod
    def attach(cls, base_url: str, api_key: str) -> AsyncSession:
        """The episode that a session key belongs to."""
        return cls(base_url, api_key)

    async def close(self) -> None:
        """Let go of the connection; ends nothing."""
        await _flush(self.base_url)
        if self._own_http:
            await self._http.close()

    async def __aenter__(self) -> Self:
        enter(self, self._owner)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        leave(self)
        if self.owned:
            await self.end(**_verdict(error))
        await self.close()

    async def _send(self, path: str, body: Json, *, may_repeat: bool) -> Json:
        if path == "end":
            await _flush(self.base_url)
        url = f"{self.base_url}/sessions/{self.id}/{path}"
        return await _apost(self._http, url, self._key(path), body, may_repeat=may_repeat)


async def _flush(base_url: str) -> None:
    """What tools reported is at the gateway, or was waited for."""
    if not REPORTS.flush(base_url, 0):
        await asyncio.to_thread(REPORTS.flush, base_url)


def _verdict(error: BaseException | None) -> Json:
    if error is None:
        return {"status": "completed"}
    return {"status": "failed", "stop_condition": "exception", "reason": f"{type(error).__name__}: {error}"}


def _post(http: httpx.Client, url: str, key: str, body: Json, *, may_repeat: bool) -> Json:
    for attempt in Retrying(**_policy(may_repeat)):
        with attempt:
            try:
                answer = http.post(url, content=orjson.dumps(body), headers=_headers(key))
            except httpx.HTTPError as error:
                raise GatewayUnreachable(f"{url} did not answer: {error}") from error
            return _answer(url, answer.status_code, answer.content)
    raise AssertionError("tenacity either returns or raises")


async def _apost(http: aiohttp.ClientSession, url: str, key: str, body: Json, *, may_repeat: bool) -> Json:
    limit = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async for attempt in AsyncRetrying(**_policy(may_repeat)):
        with attempt:
            try:
                async with http.post(url, data=orjson.dumps(body), headers=_headers(key), timeout=limit) as answer:
                    return _answer(url, answer.status, await answer.read())
            except (aiohttp.ClientError, TimeoutError) as error:
                raise GatewayUnreachable(f"{url} did not answer: {error}") from error
    raise AssertionError("tenacity either returns or raises")


def _policy(may_repeat: bool) -> Json:
    return {
        "retry": retry_if_exception_type(GatewayUnreachable),
        "stop": stop_after_attempt(ATTEMPTS if may_repeat else 1),
        "wait": wait_exponential(0.1, max=2.0),
        "reraise": True,
    }


def _headers(key: str) -> dict[str, str]:
    return {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}


def _answer(url: str, status: int, body: bytes) -> Json:
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise GatewayUnreachable(f"{url} answered {status} without JSON: is it a gateway?") from None
    if status < 300:
        return dict(content)
    error = content.get("error") or {}
    if status in (502, 503, 504):
        raise GatewayUnreachable(f"{url} answered {status}: {error.get('message')}")
    raise GatewayRefused(status, error.get("code") or "", f"{url} answered {status}: {error.get('message')}")
