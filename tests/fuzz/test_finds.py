"""The fuzz of the gateway finds a guard that is missing, within the inputs that CI sends.

Each mutant takes one guard away and leaves everything else as it is."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

from millrace.dialects import answers, match_keys, shape
from millrace.dialects.chat import request as chat_request
from millrace.dialects.completions import dialect as completions
from millrace.dialects.conversation import Text
from millrace.dialects.messages import dialect as messages_dialect
from millrace.dialects.messages.request import CountRequest
from millrace.dialects.reading import head
from millrace.dialects.rendering import messages
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.dialects.responses import reader as responses_reader
from millrace.producers.gateway import socket
from millrace.producers.gateway.calls import engine_call, engine_calls, models
from millrace.producers.gateway.episodes import bodies
from millrace.producers.gateway.episodes import service as episodes
from millrace.producers.gateway.sessions import ownership, responses
from millrace.producers.gateway.upstreams import embeddings, upstream_routes
from tests.fuzz.every_fuzz import EveryTraffic
from tests.fuzz.gateway_fuzz import Traffic
from tests.fuzz.test_gateway import BUDGET, EVERY_BUDGET, OTHERS, UPSTREAM_BUDGET, loud, renderer, rounds
from tests.fuzz.test_keys import same_keys
from tests.support.in_process import Loud

__all__ = ["loud", "renderer"]

pytestmark = pytest.mark.slow

DEFAULT_RECURSION_LIMIT = 1000
Mutant = tuple[Any, str, Any]
"""module or class, name, what stands in its place"""


@pytest.fixture(autouse=True)
def _recursion_limit() -> Iterator[None]:
    """Whatever ran in this process before (torch's compiler raises it), depth is found at the limit of a gateway."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(DEFAULT_RECURSION_LIMIT)
    yield
    sys.setrecursionlimit(before)


def _unlimited(headers: Mapping[str, str], *users: object, name: str | None = None) -> ownership.Hints:
    """`ownership.hints` without its bound."""
    name = headers.get("x-millrace-session") or name
    return ownership.Hints(name, next((user for user in users if isinstance(user, str)), ""))


def _written(made: chat_request.CallIn) -> str:
    """`request._plain` for numbers of 64 bits."""
    given = made.function.arguments
    return given if isinstance(given, str) else orjson.dumps(given).decode()


def _trusting(body: bytes) -> CountRequest:
    """`parse_count` for bodies that are one."""
    return msgspec.json.decode(body, type=CountRequest)


def _skipping(body: bytes) -> head.RequestHead:
    """`read_head`, which trusts what a parser skipped."""
    members = head._members.decode(body)
    return head.RequestHead(**{name: head._value(getattr(members, name)) for name in head.FIELDS})


def _anybody(self: responses.ResponseStore, owner: responses.Owner, id: str) -> responses.StoredResponse | None:
    """`ResponseStore.find` for whoever asks."""
    return self._kept.get(id)


def _any_version(policies: Any, model: str) -> models.WantedModel:
    """`wanted` without versions."""
    return models.WantedModel(models.policy_of(policies, model), None)


ENGINES: dict[str, Mutant] = {
    "contents that are no text": (chat_request, "_parts", lambda content, at: [Text(content)]),
    "options that are not served": (chat_request, "_check", lambda request: None),
    "labels of what is held or altered": (engine_call, "bar_of", lambda choice, sampling: None),
    "long names in reports": (bodies, "_check_names", lambda field, value: None),
    "long names of conversations": (engine_calls, "hints", _unlimited),
    "long names in messages": (chat_request, "_check_names", lambda message, at: None),
    "wide numbers in arguments": (chat_request, "_plain", _written),
    "wide numbers in tasks": (episodes, "_text", lambda value: orjson.dumps(value).decode()),
    "depth of arguments that are text": (messages, "unwieldy", lambda text: False),
    "depth and number of values": (shape, "check", lambda body: None),
}
UPSTREAM: dict[str, Mutant] = {
    "numbers of an upstream": (answers, "number", lambda given, otherwise=0: given),
    "text of an upstream": (answers, "text", lambda given: given),
    "maps of an upstream": (answers, "mapping", lambda given: given),
    "lists of an upstream": (answers, "listed", lambda given: given),
}
EVERY: dict[str, Mutant] = {
    "maps of responses of an upstream": (responses_reader, "mapping", lambda given: given),
    "counts of embeddings": (embeddings, "number", lambda given, otherwise=0: given),
    "text that a parser skips": (upstream_routes, "read_head", _skipping),
    "prompts that are counted": (messages_dialect, "parse_count", _trusting),
    "frames that are no JSON": (socket, "request_of", lambda frame: orjson.dumps({**orjson.loads(frame)})),
    "responses of another tenant": (responses.ResponseStore, "find", _anybody),
    "versions that are named": (engine_calls, "parse_model", _any_version),
    "options of completions": (completions, "_check", lambda request: None),
    "feedback that says nothing": (bodies.FeedbackIn, "reward", lambda self: self.nothing),
}
KINDS: dict[str, tuple[dict[str, Mutant], type[Traffic], int, int]] = {
    "engines": (ENGINES, Traffic, BUDGET, 1),
    "upstream": (UPSTREAM, Traffic, UPSTREAM_BUDGET, 2),
    "every": (EVERY, EveryTraffic, EVERY_BUDGET, 9),
}
"""the traffic that finds each of some mutants: how much of it CI sends, and with which seed"""


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in KINDS[kind][0]])
async def test_a_missing_guard_is_found(
    tmp_path: Path, renderer: TemplateRenderer, loud: Loud, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    mutants, traffic, budget, seed = KINDS[kind]
    budget *= 8 if OTHERS else 1  # what CI's seed finds at once, another may find later
    module, guard, instead = mutants[name]
    monkeypatch.setattr(module, guard, instead)
    with pytest.raises(AssertionError):
        await rounds(tmp_path, renderer, loud, budget, upstream=kind == "upstream", seed=seed, kind=traffic)


def test_a_key_that_takes_wide_numbers_as_they_are_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(match_keys, "_round", lambda value: value)
    with pytest.raises(AssertionError):
        same_keys()
