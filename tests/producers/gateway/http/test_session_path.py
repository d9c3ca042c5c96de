"""A name in the base_url is the header `x-millrace-session`, on every route."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from millrace.dialects.errors import ApiError
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.producers.gateway.http.session_path import PREFIX, strip_name
from millrace.producers.gateway.sessions.ownership import PATH, hints
from tests.support.gateway_world import ScriptedEngine, World, world
from tests.support.speakers import SPEAKERS, Speaker

NAME = "x-millrace-session"
names = st.text(min_size=1, max_size=20).filter(lambda name: "/" not in name)


def scope(path: str, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http", "path": path, "headers": list(headers)}


@given(names, st.text(max_size=20), st.lists(st.tuples(st.binary(), st.binary()), max_size=3), st.booleans())
def test_a_path_says_what_a_header_would(
    name: str, rest: str, others: list[tuple[bytes, bytes]], has_header: bool
) -> None:
    sent = others + [(NAME.encode(), b"of the header")] * has_header
    given = scope(f"{PREFIX}{name}/{rest}", *sent)
    if not name.isprintable():
        with pytest.raises(ApiError, match="printable"):
            strip_name(given)
        return
    found = strip_name(given)
    assert found["path"] == f"/{rest}"
    assert found["headers"] == [*sent, (PATH.encode(), name.encode())]
    said = hints(
        Headers(raw=[(key, value) for key, value in found["headers"] if key in (NAME.encode(), PATH.encode())])
    )
    assert said[::2] == (("of the header", f"header:{NAME}") if has_header else (name, "path"))
    assert given == scope(f"{PREFIX}{name}/{rest}", *sent), "as it came"


@given(st.text().filter(lambda path: not path.startswith(PREFIX)))
def test_other_paths_stay(path: str) -> None:
    assert strip_name(scope(path)) == scope(path)


async def asked(w: World, path: str, body: dict[str, Any], name: str | None = None) -> int:
    headers = {} if name is None else {NAME: name.encode()}
    return (await w.http.post(path, json=body, headers=headers)).status_code


@pytest.mark.parametrize("speaks", SPEAKERS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["chat-17", "Ein Gespräch, 7%", "v1"])
async def test_both_are_one_episode(
    tmp_path: Path, renderer: TemplateRenderer, speaks: type[Speaker], name: str
) -> None:
    engine = ScriptedEngine(lambda *_: renderer.tokenizer.encode("The answer is 42.<|im_end|>"))
    async with world(tmp_path, renderer, engine) as w:
        body = speaks(w).body("hi")
        below = f"{PREFIX}{quote(name, safe='')}{speaks.path}"
        assert await asked(w, below, body) == 200
        assert await asked(w, speaks.path, body, name) == 200
        (session,) = w.gateway.sessions.live.values()
        assert await asked(w, below, body, "another") == 200
        assert len(w.gateway.sessions.live) == 2
        assert await asked(w, f"{PREFIX}{quote(name, safe='')}/v1/feedback", {"session": name, "rating": 1.0}) == 200
        assert session.rewards
        for wrong in ("", "%0d", "%00"):
            refused = await w.http.post(f"{PREFIX}{wrong}{speaks.path}", json=body)
            assert (refused.status_code, "error" in refused.json()) == (400, True)
        assert (await w.http.get(f"{below}/nowhere")).status_code == 404
