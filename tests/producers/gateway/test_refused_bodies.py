"""Bodies that no API reads, at every route that takes one: what is wrong, and what to do, in the shape of its API."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from millrace.dialects.all import DIALECTS
from millrace.dialects.errors import ApiError
from millrace.dialects.reading.head import read_head, rename_model
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.producers.gateway.app import routes
from millrace.producers.gateway.socket import request_of
from millrace.producers.gateway.upstreams.routes import RouteRule
from millrace.producers.gateway.upstreams.upstreams import ONE
from tests.support.in_process import Answer, Far, InProcess, Played

PATHS = sorted(path for path, method, _ in routes() if method == "POST")
FAR = "far"
"""a model that an upstream answers"""


class Gateway(InProcess):
    """Its engines and its upstream answer nothing. `session`: one that is open."""

    session = ""

    async def post(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> Answer:
        """A request that leaves no trace."""
        end = self.log.end
        answer = await self.ask("POST", path.format(id=self.session), body, headers)
        assert self.log.end == end
        return answer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory, renderer: TemplateRenderer) -> AsyncIterator[Gateway]:
    far = Far([RouteRule(FAR, ONE)], lambda *_: Played(500))
    folder: Path = tmp_path_factory.mktemp("gateway")
    made = Gateway(folder, renderer, lambda _: Played(500), far=far)
    answer = await made.ask("POST", "/v1/sessions", b"{}")
    made.session = answer.json["session"]
    yield made
    await made.close()


def refused(answer: Answer, path: str) -> dict[str, Any]:
    """The error of an answer, in the shape of the API that the path is of."""
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = answer.json["error"]
    assert (answer.json.get("type") == "error") == path.startswith("/v1/messages")
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("encoding", ["gzip", "GZip", "br", "identity, gzip", "x" * 100])
async def test_a_compressed_body_is_refused_with_what_to_do(gateway: Gateway, path: str, encoding: str) -> None:
    answer = await gateway.post(
        path, gzip.compress(json.dumps({"model": FAR}).encode()), {"content-encoding": encoding}
    )
    assert answer.status == 415
    said = refused(answer, path)["message"]
    assert encoding.lower()[:40] in said
    assert "send it as it is, without the header" in said


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", PATHS)
async def test_a_plain_body_may_say_so(gateway: Gateway, path: str) -> None:
    plain, identity = [await gateway.post(path, b"{", headers) for headers in ({}, {"content-encoding": " Identity"})]
    assert (plain.status, plain.body) == (identity.status, identity.body)
    assert plain.status == 400
    refused(plain, path)


# ---------------------------------------------------------------------- halves of surrogate pairs

HALVES = ("\ud800", "\udfff", "ab\udbffc", "\ude00\ud83d", "\U0001f600\ud83d")
halves = st.sampled_from(HALVES)
places = st.lists(st.sampled_from(("x", "input", "messages")) | st.integers(0, 2), max_size=5)


def nested(place: list[str | int], value: Any) -> Any:
    """A value with `value` at a place, and others before it."""
    for step in reversed(place):
        value = {"before": "\U0001f600", step: value} if isinstance(step, str) else ["\\ud800"] * step + [value]
    return value


@given(places, halves, st.booleans())
def test_half_a_pair_is_named_with_its_place(place: list[str | int], half: str, is_name: bool) -> None:
    text = json.dumps({"model": "m", "odd": nested(place, {half: 1} if is_name else half)}).encode()
    for read in (read_head, lambda text: rename_model(text, "n"), request_of, *(dialect.parse for dialect in DIALECTS)):
        with pytest.raises(ApiError, match="half of a surrogate pair is no character") as refusal:
            read(text)
        steps = [int(step) if step.isdecimal() else step for step in re.findall(r"\w+", refusal.value.param or "")]
        assert (refusal.value.status, steps) == (400, ["odd", *place])


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("model", [FAR, "policy"])
async def test_half_a_pair_is_refused_at_every_route(gateway: Gateway, path: str, half: str, model: str) -> None:
    for place, body in (("messages[0].content: ", {"model": model, "messages": [{"content": half}]}), ("", {half: 1})):
        answer = await gateway.post(path, json.dumps(body).encode())
        said = refused(answer, path)["message"]
        assert answer.status == 400
        if not said.startswith("Object contains unknown field"):  # what reports about sessions look at first
            assert said.startswith(f"{place}half of a surrogate pair")
