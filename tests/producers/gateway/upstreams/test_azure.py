"""Azure OpenAI on either side: its real client before a gateway, and a gateway before urls of its shape."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra.config import Settings
from millrace.infra.config.upstreams import passable
from millrace.infra.engines.azure import AzureUpstream
from millrace.infra.engines.base import Sampling
from millrace.infra.errors import ConfigError
from millrace.producers.gateway.http.azure_path import DEPLOYMENT, to_v1
from millrace.producers.gateway.upstreams.upstreams import make
from tests.support.fake_http import answer, serving
from tests.support.gateway_world import ScriptedEngine, World, world

KEYS = {"a long random word": "one"}
VERSION = "2024-10-21"
USER = {"role": "user", "content": "hi"}


def served(folder: Path, renderer: TemplateRenderer, **more: Any) -> Any:
    def script(prompt: list[int], sampling: Sampling, choice: int) -> Sequence[int]:
        return renderer.tokenizer.encode("Yes.<|im_end|>")

    return world(folder, renderer, ScriptedEngine(script), keys=KEYS, **more)


def azure(w: World, path: str = "", **more: Any) -> openai.AsyncAzureOpenAI:
    given = {"api_key": "a long random word", **more}
    return w.kept(openai.AsyncAzureOpenAI(azure_endpoint=f"{w.url}{path}", api_version=VERSION, max_retries=0, **given))


async def test_its_client_speaks_to_the_gateway(tmp_path: Path, renderer: TemplateRenderer) -> None:
    async with served(tmp_path, renderer) as w:
        client = azure(w, "/session/chat-1")
        reply = await client.chat.completions.create(model="policy", messages=[USER])
        text = ""
        async for chunk in await client.chat.completions.create(model="policy", messages=[USER], stream=True):
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        first = await client.responses.create(model="policy", input="hi")
        again = await client.responses.create(model="policy", input="so", previous_response_id=first.id)
        assert {reply.choices[0].message.content, text, first.output_text, again.output_text} == {"Yes."}
        assert (await client.responses.retrieve(first.id)).output_text == "Yes."
        assert [model.id async for model in client.models.list()] == ["policy"]
        token = azure(w, "/session/chat-1", api_key=None, azure_ad_token="a long random word")
        of_token = await token.completions.create(model="policy", prompt="hi", max_tokens=9)
        assert of_token.choices[0].text.startswith("Yes.")
        assert {call["identified_by"] for call in w.calls()} == {"path"}
        assert len({event["trajectory"] for event in w.events()}) == 1
        with pytest.raises(openai.AuthenticationError):
            await azure(w, api_key="wrong").chat.completions.create(model="policy", messages=[USER])
        with pytest.raises(openai.NotFoundError, match="policy@x"):
            await client.chat.completions.create(model="policy@x", messages=[USER])
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="policy", messages=[])
        for body, status in ((b"[]", 400), (b"{", 400)):
            got = await w.http.post(
                "/openai/deployments/policy/chat/completions?api-version=1",
                content=body,
                headers={"api-key": "a long random word"},
            )
            assert (got.status_code, list(got.json())) == (status, ["error"])
        for path in ("/openai/deployments/policy/images", "/openai/deployments//chat/completions", "/openai/x"):
            missing = await w.http.post(path, json={}, headers={"api-key": "a long random word"})
            assert (missing.status_code, list(missing.json())) == (404, ["error"])


@asynccontextmanager
async def before(folder: Path, settings: dict[str, Any]) -> AsyncIterator[World]:
    upstreams = make(Settings.model_validate({"gateway": settings}), {"AZURE": "sk-azure"})
    async with world(folder, None, None, upstream=upstreams, keys=KEYS) as w:
        yield w


async def test_the_deployment_is_the_model_whatever_the_body_names(tmp_path: Path) -> None:
    """An upstream gets the very bytes where both are one."""
    async with serving(answer(b'{"id": "c", "choices": []}')) as far:
        routes = [{"model": "*", "upstream": "far"}]
        upstream = {"url": f"{far.url}/v1", "speaks": ["chat", "completions"]}
        async with before(tmp_path, {"upstreams": {"far": upstream}, "routes": routes}) as w:
            for body, sent in (
                (b'{ "model":"a/b", "messages": [] }', b'{ "model":"a/b", "messages": [] }'),
                (b'{"model":"other","messages":[ ]}', b'{"model":"a/b","messages":[ ]}'),
                (b'{"messages":[ ]}', b'{"messages":[ ],"model":"a/b"}'),
            ):
                await w.http.post(
                    f"/openai/deployments/a%2Fb/chat/completions?api-version={VERSION}&x=1%262",
                    content=body,
                    headers={"api-key": "a long random word"},
                )
                head, got = far.requests[-1]
                assert got == sent
                assert head.startswith("POST /v1/chat/completions?x=1%262 ")
            client = azure(w)
            await client.completions.create(model="a/chat", prompt="hi")
            head, got = far.requests[-1]
            assert head.startswith("POST /v1/completions ")
            assert json.loads(got)["model"] == "a/chat"


async def test_an_upstream_of_its_shape(tmp_path: Path, renderer: TemplateRenderer) -> None:
    """A gateway is the Azure of another: the deployment is in the path, the version in the query, the key in its
    header, and headers that the settings name go on."""
    async with served(tmp_path / "far", renderer) as far:
        azure_ = {
            "url": f"{far.url}/openai",
            "speaks": ["chat", "responses"],
            "key_env": "AZURE",
            "key_header": "api-key",
            "shape": "azure",
            "api_version": VERSION,
        }
        routes = [{"model": "gpt-*", "upstream": "azure", "send_as": "policy"}]
        upstreams = make(
            Settings.model_validate({"gateway": {"upstreams": {"azure": azure_}, "routes": routes}}),
            {"AZURE": "a long random word"},
        )
        async with world(tmp_path / "near", None, None, upstream=upstreams, keys={"near": "one"}) as w:
            client = w.kept(openai.AsyncOpenAI(base_url=f"{w.url}/v1", api_key="near", max_retries=0))
            reply = await client.chat.completions.create(model="gpt-x", messages=[USER])
            first = await client.responses.create(model="gpt-x", input="hi")
            again = await client.responses.create(model="gpt-x", input="so", previous_response_id=first.id)
            assert (await client.responses.retrieve(again.id)).output_text == "Yes."
            message = await w.http.post(
                "/v1/messages",
                json={"model": "gpt-x", "max_tokens": 9, "messages": [USER]},
                headers={"authorization": "Bearer near"},
            )
            assert message.json()["content"][0]["text"] == "Yes."
            assert (reply.choices[0].message.content, again.output_text) == ("Yes.", "Yes.")
            assert [call["engine"] for call in w.calls()] == ["azure"] * 4
        assert len(far.calls()) == 4


async def test_what_goes_on_and_what_never_does(tmp_path: Path) -> None:
    async with serving(answer(b'{"id": "c", "choices": [], "data": []}')) as far:
        azure_ = {
            "url": f"{far.url}/openai",
            "speaks": ["chat", "embeddings"],
            "key_env": "AZURE",
            "key_header": "api-key",
            "shape": "azure",
            "api_version": VERSION,
            "pass_headers": ["X-Request-Id", "openai-organization"],
        }
        routes = [{"model": "gpt *", "upstream": "azure"}]
        async with before(tmp_path, {"upstreams": {"azure": azure_}, "routes": routes}) as w:
            headers = [
                (b"authorization", b"Bearer a long random word"),
                (b"x-request-id", "für 7".encode()),
                (b"openai-organization", b"\xff"),
                (b"x-other", b"stays"),
                (b"cookie", b"c=1"),
            ]
            for path in ("chat/completions", "embeddings"):
                body = json.dumps({"model": "gpt 4/o", "messages": [USER], "input": "hi"}).encode()
                await w.http.post(f"/v1/{path}?api-version=mine&a=b", content=body, headers=headers)
                head, sent = far.requests[-1]
                assert sent == body
                assert head.startswith(f"POST /openai/deployments/gpt%204%2Fo/{path}?a=b&api-version={VERSION} HTTP")
                assert "api-key: sk-azure" in head
                assert "für 7" in head
                assert not any(word in head.lower() for word in ("organization", "random", "stays", "cookie"))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"shape": "azure"}, "needs an api_version"),
        ({"shape": "other"}, "shape"),
        ({"api_version": "1&x"}, "api_version"),
        *(
            ({"pass_headers": [name]}, name.lower() or "no name")
            for name in (
                *("Authorization", "x-api-key", "api-key", "Cookie", "set-cookie", "X-Goog-Api-Key", "helicone-auth"),
                *("x-amz-security-token", "host", "connection", "transfer-encoding", "content-length", "te", "upgrade"),
                *("proxy-authorization", "x-forwarded-for", "x-millrace-session", "idempotency-key", "a b", ""),
            )
        ),
    ],
)
def test_what_no_upstream_may_be(wrong: dict[str, Any], said: str) -> None:
    upstream = {"url": "http://127.0.0.1:1/openai", **wrong}
    with pytest.raises((ConfigError, ValueError), match=said):
        Settings.model_validate({"gateway": {"upstreams": {"far": upstream}}})


@given(st.text(max_size=30) | st.from_regex(r"[A-Za-z-]{1,12}(key|token|auth|cookie)", fullmatch=True))
def test_a_header_that_may_hold_a_secret_is_never_passable(name: str) -> None:
    try:
        found = passable(name)
    except ValueError:
        return
    assert found == name.lower()
    assert not {"key", "token", "auth", "cookie", "secret"} & set(found.replace("_", "-").replace(".", "-").split("-"))


@given(
    st.sampled_from(("/chat/completions", "/completions", "/embeddings")),
    st.text(min_size=1, max_size=20) | st.sampled_from(("a/chat", "/chat", "a/completions", "/", "a/chat/completions")),
    st.dictionaries(st.sampled_from(("a", "b", "api-version")), st.text(max_size=5), max_size=3),
)
def test_a_path_that_is_written_is_read_again(below: str, model: str, query: dict[str, str]) -> None:
    try:
        body = json.dumps({"model": model}, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return
    upstream = AzureUpstream("http://h/openai", "", VERSION, deployments=True)
    placed, _, fields = upstream.path_of(f"{below}?{urlencode(query)}", body).partition("?")
    kept = [(name, text) for name, text in query.items() if name != "api-version"]
    assert parse_qsl(fields, keep_blank_values=True) == [*kept, ("api-version", VERSION)]
    path = f"/openai{placed}"
    scope = to_v1({"path": unquote(path), "raw_path": path.encode(), "query_string": fields.encode()})
    assert (scope["path"], scope[DEPLOYMENT]) == (f"/v1{below}", model)
    assert parse_qsl(scope["query_string"].decode(), keep_blank_values=True) == kept
    path, _, fields = (
        AzureUpstream("http://h/openai/v1", "", VERSION, deployments=False).path_of(below, body).partition("?")
    )
    assert (path, fields) == (below, f"api-version={VERSION}")
