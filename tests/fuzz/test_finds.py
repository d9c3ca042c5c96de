"""The fuzz of the gateway finds a guard that is missing, within the inputs that CI sends.

Each mutant takes one guard away and leaves everything else as it is."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest

from millrace.producers.gateway import answers, bodies, call, episodes, gateway, keys, shape, whose
from millrace.producers.gateway.conversation import Text
from millrace.producers.gateway.protocols import chat_request
from millrace.producers.gateway.rendering import messages
from millrace.producers.gateway.rendering.template import TemplateRenderer
from tests.fuzz.test_gateway import BUDGET, UPSTREAM_BUDGET, loud, renderer, rounds
from tests.fuzz.test_keys import same_keys
from tests.support.in_process import Loud

__all__ = ["loud", "renderer"]

pytestmark = pytest.mark.slow

DEFAULT_RECURSION_LIMIT = 1000


@pytest.fixture(autouse=True)
def _recursion_limit() -> Iterator[None]:
    """Whatever ran in this process before (torch's compiler raises it), depth is found at the limit of a gateway."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(DEFAULT_RECURSION_LIMIT)
    yield
    sys.setrecursionlimit(before)


def _unlimited(headers: Mapping[str, str], *users: object, name: str | None = None) -> whose.Hints:
    """`whose.hints` without its bound."""
    name = headers.get("x-millrace-session") or name
    return whose.Hints(name, next((user for user in users if isinstance(user, str)), ""))


def _written(made: chat_request.CallIn) -> str:
    """`chat_request._plain` for numbers of 64 bits."""
    given = made.function.arguments
    return given if isinstance(given, str) else orjson.dumps(given).decode()


MUTANTS: dict[str, tuple[Any, str, Any, bool]] = {
    "contents that are no text": (chat_request, "_parts", lambda content, at: [Text(content)], False),
    "numbers of an upstream": (answers, "number", lambda given, otherwise=0: given, True),
    "text of an upstream": (answers, "text", lambda given: given, True),
    "maps of an upstream": (answers, "mapping", lambda given: given, True),
    "lists of an upstream": (answers, "listed", lambda given: given, True),
    "options that are not served": (chat_request, "_check", lambda request: None, False),
    "labels of what is held or altered": (call.Call, "_why_not", lambda self, choice: None, False),
    "long names in reports": (bodies, "_check_names", lambda field, value: None, False),
    "long names of conversations": (gateway, "hints", _unlimited, False),
    "long names in messages": (chat_request, "_check_names", lambda message, at: None, False),
    "wide numbers in arguments": (chat_request, "_plain", _written, False),
    "wide numbers in tasks": (episodes, "_text", lambda value: orjson.dumps(value).decode(), False),
    "depth of arguments that are text": (messages, "unwieldy", lambda text: False, False),
    "depth and number of values": (shape, "check", lambda body: None, False),
}
"""by what they no longer guard: module, name, what stands in its place, whether an upstream answers"""


@pytest.mark.parametrize("name", MUTANTS)
async def test_a_missing_guard_is_found(
    tmp_path: Path, renderer: TemplateRenderer, loud: Loud, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module, guard, instead, upstream = MUTANTS[name]
    monkeypatch.setattr(module, guard, instead)
    budget, seed = (UPSTREAM_BUDGET, 2) if upstream else (BUDGET, 1)
    with pytest.raises(AssertionError):
        await rounds(tmp_path, renderer, loud, budget, upstream=upstream, seed=seed)


def test_a_key_that_takes_wide_numbers_as_they_are_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_rounded", lambda value: value)
    with pytest.raises(AssertionError):
        same_keys()
