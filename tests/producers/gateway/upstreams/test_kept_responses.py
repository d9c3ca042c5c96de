"""OpenAI's client asks for responses of the past, for their items, and deletes them: those that are kept here, and
those that an upstream keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from millrace.dialects.rendering.template import TemplateRenderer
from millrace.producers.gateway.upstreams.upstreams import Upstream
from tests.producers.gateway.far_responses import FarResponses, FarUpstream
from tests.producers.gateway.upstreams.test_named_by_clients import FarChat, before, client, played, told
from tests.support.gateway_world import World


def keeping(far: FarResponses) -> Upstream:
    server = FarUpstream(f"http://{far.name}.test/v1")
    server.far = far
    return Upstream(far.name, server, frozenset({"responses"}))


async def gone(api: openai.AsyncOpenAI, id: str) -> None:
    """As an id that nobody has."""
    for asking in (api.responses.retrieve(id), api.responses.delete(id), api.responses.input_items.list(id)):
        with pytest.raises(openai.NotFoundError, match=f"Response with id '{id}' not found"):
            await asking


def others(w: World) -> list[openai.AsyncOpenAI]:
    """Callers who were told nothing: another tenant's, another conversation's, another end user's."""
    headers = [{"session-id": "t-1"}, {"x-millrace-user": "ann"}]
    return [client(w, "another random word"), *(client(w, **one) for one in headers)]


@pytest.mark.parametrize("model", ["policy", "chat"])
async def test_what_is_kept_here(tmp_path: Path, renderer: TemplateRenderer, model: str) -> None:
    upstreams = [played("chat", FarChat().answer, "chat")]
    async with before(tmp_path, renderer, *upstreams) as w:
        mine, made, last = client(w), list[Any](), None
        for number in range(3):
            made.append(await told(mine, model=model, input=f"q{number}", previous_response_id=last))
            last = made[-1].id
        for asked in ({"order": "asc", "limit": 2}, {"limit": 1}, {}):
            items = [item async for item in mine.responses.input_items.list(last, **asked)]
            texts = [item.content[0].text for item in (items if asked.get("order") else items[::-1])]
            assert texts == ["q0", made[0].output_text, "q1", made[1].output_text, "q2"]
            assert [item.role for item in items] == ["user", "assistant", "user", "assistant", "user"]
        assert (await mine.responses.retrieve(last)).output_text == made[-1].output_text
        for asked in ({"limit": 1000}, {"order": "up"}, {"after": "nobody"}):
            with pytest.raises(openai.BadRequestError) as refused:
                await mine.responses.input_items.list(last, **asked)
            assert refused.value.param in asked
        with pytest.raises(openai.BadRequestError, match="stream"):
            await mine.responses.retrieve(last, stream=True)
        for api in others(w):
            await gone(api, last)
        await mine.responses.delete(made[1].id)
        seen = len(w.events())
    for _ in range(2):
        async with before(tmp_path, renderer, *upstreams) as w:
            await gone(client(w), made[1].id)
            for asked_for in ("policy", "chat"):
                with pytest.raises(openai.BadRequestError) as refused:
                    await told(client(w), model=asked_for, input="so", previous_response_id=made[1].id)
                assert refused.value.code == "previous_response_not_found"
            assert len(w.events()) == seen
            kept = [item async for item in client(w).responses.input_items.list(last)]
            assert len(kept) == 5
            await told(client(w), model=model, input="on", previous_response_id=last)
            seen = len(w.events())


async def test_what_an_upstream_keeps(tmp_path: Path, renderer: TemplateRenderer) -> None:
    far = FarResponses()
    async with before(tmp_path, renderer, keeping(far)) as w:
        mine = client(w)
        first = await told(mine, model="far", input="q0")
        second = await told(mine, model="far", input="q1", previous_response_id=first.id, streamed=True)
        for api in others(w):
            await gone(api, first.id)
        assert far.asked == []
        await gone(mine, "resp_none")
    async with before(tmp_path, renderer, keeping(far)) as w:  # a start knows whose they are
        mine = client(w)
        assert (await mine.responses.retrieve(first.id)).output == first.output
        await mine.responses.input_items.list(second.id, limit=3, order="asc")
        await mine.responses.delete(first.id)
        assert [one.split("?")[0] for one in far.asked] == [
            f"GET /responses/{first.id}",
            f"GET /responses/{second.id}/input_items",
            f"DELETE /responses/{first.id}",
        ]
        assert "limit=3" in far.asked[1]
        await gone(mine, first.id)
        for model in ("policy", "far"):
            with pytest.raises(openai.BadRequestError):
                await told(mine, model=model, input="so", previous_response_id=first.id)
        await told(mine, model="policy", input="so", previous_response_id=second.id)
    async with before(tmp_path, renderer, keeping(FarResponses("new"))) as w:
        await gone(client(w), first.id)
        with pytest.raises(openai.NotFoundError, match="upstream 'far', which keeps it, is not in the settings"):
            await client(w).responses.retrieve(second.id)
