"""Tools of an agent that report themselves: a decorator for plain functions, synchronous or not.

    @millrace.tool
    def add(a: float, b: float) -> float:
        return a + b

    with Session.start(...):
        add(3, b=4)  # a tool_call and its tool_result in that episode

Invariants: a decorated function returns and raises what it would without us, whatever reporting meets, and keeps its
name and signature; without a session it reports nothing. A call is one tool_call and one tool_result with an id of its
own; both say when they happened. The session is the one that its context entered last and has not left: tasks have it
from the code that makes them, and a thread from `Session.active` or a decorator of the session."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, overload

import orjson

from millrace.producers.gateway.episodes.bodies import ToolCallIn, ToolResultIn, post_body
from millrace.producers.intake.conversation import Owner
from millrace.producers.reports import REPORTS
from millrace.schemas import bounds
from millrace.schemas.ids import new_id, now_micros
from millrace.schemas.records import ToolStatus

F = TypeVar("F", bound=Callable[..., Any])
SideEffect = Literal["none", "reversible", "irreversible"]

current: ContextVar[Owner | None] = ContextVar("millrace_session", default=None)
"""the session that tools report to"""
_blocks: ContextVar[tuple[tuple[object, Owner], ...]] = ContextVar("millrace_entered", default=())
"""the blocks of sessions that this context is in, the innermost last: each with its mark"""


def enter(mark: object, owner: Owner) -> None:
    """A block of a session begins in this context."""
    _blocks.set((*_blocks.get(), (mark, owner)))
    current.set(owner)


def leave(mark: object) -> None:
    """The innermost block with this mark is over, whichever others are in between. Nothing where this context did not
    enter it."""
    inside = _blocks.get()
    at = next((at for at in reversed(range(len(inside))) if inside[at][0] is mark), None)
    if at is not None:
        rest = inside[:at] + inside[at + 1 :]
        _blocks.set(rest)
        current.set(rest[-1][1] if rest else None)


@dataclass(frozen=True)
class Spec:
    """What is known of a tool before it is called. `call_id`: the parameter that holds the model's id of the call."""

    name: str
    signature: inspect.Signature | None
    version: str | None = None
    side_effect: SideEffect | None = None
    call_id: str | None = None
    leave_out: frozenset[str] = frozenset()
    owner: Owner | None = None


@overload
def tool(function: F, /) -> F: ...
@overload
def tool(
    *,
    name: str | None = None,
    version: str | None = None,
    side_effect: SideEffect | None = None,
    call_id: str | None = None,
    leave_out: Collection[str] = (),
) -> Callable[[F], F]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    version: str | None = None,
    side_effect: SideEffect | None = None,
    call_id: str | None = None,
    leave_out: Collection[str] = (),
) -> Any:
    """Report each call of a function, plain or async, to the current session: arguments, result or error, latency.

    `name`: what the model calls it, where that is not the function's own name. `call_id`: the parameter in which the
    framework passes the model's id of the call; without it the gateway looks for the model's call by name and
    arguments. `leave_out`: parameters that the model does not give. `side_effect`: what a call changes in the world.
    It may stand above `@staticmethod` and `@classmethod` or below them. Raises TypeError for what is no plain function,
    such as a generator or a class."""
    return decorate(function, None, name, version, side_effect, call_id, leave_out)


def decorate(
    function: Callable[..., Any] | None,
    owner: Owner | None,
    name: str | None,
    version: str | None,
    side_effect: SideEffect | None,
    call_id: str | None,
    leave_out: Collection[str],
) -> Any:
    """`tool`, for the session of `owner` where one is given."""
    if function is None:
        return lambda target: decorate(target, owner, name, version, side_effect, call_id, leave_out)
    if isinstance(function, staticmethod | classmethod):
        inner = decorate(function.__func__, owner, name, version, side_effect, call_id, leave_out)
        return type(function)(inner)
    generates = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    if not callable(function) or inspect.isclass(function) or generates:
        raise TypeError(f"{function!r} cannot be a tool: decorate a function that returns its result")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some that are written in C have none
        signature = None
    first = next(iter(signature.parameters), "") if signature else ""
    unsaid = frozenset(leave_out) | ({first} & {"self", "cls"}) | ({call_id} if call_id else set())
    function_name = getattr(function, "__name__", type(function).__name__)
    return wrap(function, Spec(name or function_name, signature, version, side_effect, call_id, unsaid, owner))


def wrap(function: Callable[..., Any], spec: Spec) -> Callable[..., Any]:
    """The function, reporting each call."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def later(*args: Any, **kwargs: Any) -> Any:
            with ToolCallReport(spec, args, kwargs) as call:
                call.result = await function(*args, **kwargs)
            return call.result

        return later

    @functools.wraps(function)
    def at_once(*args: Any, **kwargs: Any) -> Any:
        call = ToolCallReport(spec, args, kwargs)
        with call:
            call.result = function(*args, **kwargs)
            call.waits = inspect.iscoroutine(call.result)
        return await_result(call) if call.waits else call.result

    return at_once


async def await_result(call: ToolCallReport) -> Any:
    """The result of a plain function that returned a coroutine."""
    pending, call.waits = call.result, False
    with call:
        call.result = await pending
    return call.result


class ToolCallReport:
    """One call of a tool, entered when it begins; `waits`: its block ends before it does. Reporting never raises."""

    def __init__(self, spec: Spec, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.result: Any = None
        self.waits = False
        self._spec, self._args, self._kwargs = spec, args, kwargs
        self._owner = spec.owner or current.get()
        self._id: str | None = None
        self._began = 0.0

    def __enter__(self) -> Self:
        if self._owner is not None and self._id is None:
            self._report(self._call_event)
            self._began = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._owner is not None and not self.waits:
            self._report(lambda: self._result_event(error, round((time.perf_counter() - self._began) * 1e6)))

    def _report(self, event: Callable[[], dict[str, Any]]) -> None:
        assert self._owner is not None
        try:
            body = event()
        except Exception as error:  # a value may raise whatever it likes when it is written down: the tool goes on
            REPORTS.miss(self._owner, f"a call of {self._spec.name} cannot be written down ({type(error).__name__})")
            self._owner = None
        else:
            REPORTS.take(self._owner, body)

    def _call_event(self) -> dict[str, Any]:
        values = arguments(self._spec.signature, self._args, self._kwargs)
        model_id = values.get(self._spec.call_id) if self._spec.call_id else None
        self._id = call_id = model_id if isinstance(model_id, str) and model_id else new_id()
        fields = {name: value for name, value in values.items() if name not in self._spec.leave_out}
        return post_body(
            ToolCallIn,
            call_id=call_id,
            name=self._spec.name,
            arguments=as_json(fields),
            join=call_id != model_id,
            event_time=now_micros(),
        )

    def _result_event(self, error: BaseException | None, latency_us: int) -> dict[str, Any]:
        assert self._id is not None, "it was asked"
        return post_body(
            ToolResultIn,
            call_id=self._id,
            name=self._spec.name,
            status=status(error),
            content=as_text(self.result) if error is None else as_text(f"{type(error).__name__}: {error}"),
            latency_us=min(max(latency_us, 0), bounds.WAIT_MS * 1000),
            tool_version=self._spec.version,
            side_effect=self._spec.side_effect,
            event_time=now_micros(),
        )


def arguments(signature: inspect.Signature | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a call gave each parameter, by its name; defaults that it left alone are not among them."""
    try:
        if signature is None:
            raise TypeError
        values = signature.bind(*args, **kwargs).arguments
    except TypeError:  # the call itself fails, or has no names to go by
        return {**({"args": list(args)} if args else {}), **kwargs}
    kinds = signature.parameters
    out: dict[str, Any] = {}
    for name, value in values.items():
        if kinds[name].kind is inspect.Parameter.VAR_KEYWORD:
            out.update(value)
        else:
            out[name] = value
    return out


def status(error: BaseException | None) -> ToolStatus:
    """How a call ended."""
    if error is None:
        return "ok"
    if isinstance(error, TimeoutError):
        return "timeout"
    return "error" if isinstance(error, Exception) and not isinstance(error, asyncio.CancelledError) else "cancelled"


def as_text(value: Any) -> str:
    """A result as text: a string as it is, anything else as JSON."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else as_json(value)


def as_json(value: Any) -> str:
    """JSON of any value; what has no form in JSON is written as Python shows it."""
    try:
        return orjson.dumps(value, default=_as_plain, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:  # integers of more than 64 bits, text that is no Unicode, depth
        return json.dumps(value, default=repr, skipkeys=True)


def _as_plain(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    if callable(dump) and not isinstance(value, type):
        return dump(mode="json", exclude_unset=True)
    return sorted(value, key=repr) if isinstance(value, set | frozenset) else repr(value)
