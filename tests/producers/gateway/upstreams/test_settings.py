"""From a file of settings to upstreams and rules."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.dialects.errors import ApiError
from millrace.dialects.translation.interpreter import Interpreter
from millrace.infra.config import Settings
from millrace.infra.config.read import load
from millrace.infra.config.upstreams import check_bare
from millrace.infra.errors import ConfigError
from millrace.producers.gateway.prices import Prices
from millrace.producers.gateway.upstreams.upstreams import make
from tests.support.fake_http import answer, serving

FILE = """
[gateway.upstreams.far]
url = "https://far.example.org/v1/"
speaks = ["messages", "responses"]
key_env = "FAR_KEY"
key_header = "x-api-key"
retries = 2
fallback = "spare"

[gateway.upstreams.spare]
url = "http://127.0.0.1:1/v1"
speaks = ["responses"]

[[gateway.routes]]
model = "far-*"
upstream = "far"
prices = { prompt = 2, completion = 4 }
"""

UPSTREAMS = {"far": {"url": "http://h/v1", "key_env": "FAR_KEY"}}
ROUTES = [{"model": "*", "upstream": "far"}]


async def test_a_file_says_who_answers(tmp_path: Path) -> None:
    path = tmp_path / "millrace.toml"
    path.write_text(FILE)
    found = make(load(path), {"FAR_KEY": "sk-far"})
    assert found is not None
    assert not found.answers_all
    rule = found.route(["policy"], "far-1", "responses")
    assert rule is not None
    assert (rule.upstream, rule.prices) == ("far", Prices(2.0, 4.0, 2.0))
    first, second = found.chain(rule, "responses")
    asked = found.chain(rule, "messages")
    assert [(one.name, isinstance(one.client, Interpreter)) for one in asked] == [("far", False), ("spare", True)]
    assert [one.name for one in found.chain_of(rule, "messages")] == ["far"]
    assert (first.name, first.retries, first.engine) == ("far", 2, "far")
    assert (first.client.base_url, second.client.base_url) == ("https://far.example.org/v1", "http://127.0.0.1:1/v1")
    assert found.route(["policy"], "other", "chat") is None
    with pytest.raises(ApiError, match="another API than completions"):
        found.route(["policy"], "far-1", "completions")
    assert make(load(path, flags={"gateway.routes": "[]"}), {"FAR_KEY": "sk-far"}) is None


async def test_one_upstream_in_place_of_the_engines_comes_last(tmp_path: Path) -> None:
    path = tmp_path / "millrace.toml"
    path.write_text(f'[gateway]\nupstream_url = "http://127.0.0.1:2/v1"\n{FILE}')
    found = make(load(path), {"FAR_KEY": "sk-far"})
    assert found is not None
    assert found.answers_all
    for model, dialect, engine in (
        ("far-1", "messages", "far"),
        ("policy", "chat", "openai"),
        ("far-1", "chat", "openai"),
    ):
        rule = found.route(["policy"], model, dialect)
        assert rule is not None
        assert found.chain(rule, dialect)[0].engine == engine
    with pytest.raises(ApiError, match="another API than embeddings"):
        found.route(["policy"], "policy", "embeddings")


def test_a_key_that_is_missing_and_a_route_that_leads_nowhere_are_named(tmp_path: Path) -> None:
    path = tmp_path / "millrace.toml"
    path.write_text(FILE)
    with pytest.raises(ConfigError, match=r"\[gateway.upstreams.far\] key_env: FAR_KEY is not in the environment"):
        make(load(path), {})
    path.write_text(FILE.replace('upstream = "far"', 'upstream = "fur"'))
    with pytest.raises(ConfigError, match=r"\[\[gateway.routes\]\] 0 \('far-\*'\): 'fur' is none of .* far, spare"):
        load(path)
    path.write_text(FILE.replace("retries", "retreis"))
    with pytest.raises(ConfigError, match=r"\[gateway.upstreams.far\] retreis is no setting; did you mean retries"):
        load(path)
    path.write_text(FILE.replace("prompt = 2", "promt = 2"))
    with pytest.raises(ConfigError, match="promt is no setting; did you mean prompt"):
        load(path)


@given(st.text("u:%2F@\\", max_size=6), st.text("u:%2F@/", max_size=6))
def test_a_url_has_no_user(authority: str, path: str) -> None:
    url = f"https://{authority}h/{path}"
    try:
        assert check_bare(url) == url
        assert "@" not in authority
    except ValueError:
        assert "@" in authority


@pytest.mark.parametrize(
    ("file", "setting"),
    [
        (FILE.replace("://far", "://me:SECRET@far"), r"\[gateway.upstreams.far\] url"),
        ('[gateway]\nupstream_url = "http://SECRET@h/v1"', r"\[gateway\] upstream_url"),
        ('[gateway]\nupstream_url = "me:SECRET@h/v1"', r"\[gateway\] upstream_url"),
    ],
)
def test_a_url_with_a_secret_is_refused_without_saying_it(tmp_path: Path, file: str, setting: str) -> None:
    path = tmp_path / "millrace.toml"
    path.write_text(file)
    with pytest.raises(ConfigError, match=f"{setting}.*leave them out") as refused:
        load(path)
    assert "SECRET" not in str(refused.value)


@pytest.mark.parametrize("key", ["sk-far\n", "  sk-far\r\n"])
async def test_space_around_a_key_is_left_out(tmp_path: Path, key: str) -> None:
    path = tmp_path / "millrace.toml"
    async with serving(answer(b"{}")) as far:
        path.write_text(FILE.replace("https://far.example.org/v1/", far.url))
        found = make(load(path), {"FAR_KEY": key})
        assert found is not None
        rule = found.route(["policy"], "far-1", "messages")
        assert rule is not None
        await found.chain(rule, "messages")[0].client.ask("/messages", b"{}")
        await found.close()
        assert "x-api-key: sk-far\r\n" in far.requests[0][0]


@given(st.text(max_size=6), st.sampled_from(["\x00", "\n", "\r", "\x7f", "ä", "\u2028", "\ud800"]), st.text(max_size=6))
def test_a_key_that_no_header_holds_is_refused_without_saying_it(before: str, odd: str, after: str) -> None:
    key = f"SECRET{before}{odd}{after}SECRET"
    for settings, environment in (
        (Settings.model_validate({"gateway": {"upstreams": UPSTREAMS, "routes": ROUTES}}), {"FAR_KEY": key}),
        (Settings.model_validate({"gateway": {"upstream_url": "http://h/v1", "upstream_key": key}}), {}),
    ):
        with pytest.raises(ConfigError, match="holds a character that no key has") as refused:
            make(settings, environment)
        assert "SECRET" not in str(refused.value)
