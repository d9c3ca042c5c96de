"""From a file of settings to upstreams and rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.infra.config.read import load
from millrace.infra.errors import ConfigError
from millrace.producers.gateway.errors import ApiError
from millrace.producers.gateway.upstreams.prices import Prices
from millrace.producers.gateway.upstreams.upstreams import make

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


async def test_a_file_says_who_answers(tmp_path: Path) -> None:
    path = tmp_path / "millrace.toml"
    path.write_text(FILE)
    found = make(load(path), {"FAR_KEY": "sk-far"})
    assert found is not None
    assert not found.whole
    rule = found.route("policy", "far-1", "responses")
    assert rule is not None
    assert (rule.upstream, rule.prices) == ("far", Prices(2.0, 4.0, 2.0))
    first, second = found.chain(rule, "responses")
    assert [upstream.name for upstream in found.chain(rule, "messages")] == ["far"]
    assert (first.name, first.retries, first.engine) == ("far", 2, "far")
    assert (first.client.base_url, second.client.base_url) == ("https://far.example.org/v1", "http://127.0.0.1:1/v1")
    assert found.route("policy", "other", "chat") is None
    with pytest.raises(ApiError, match="another API than chat"):
        found.route("policy", "far-1", "chat")
    assert make(load(path, flags={"gateway.routes": "[]"}), {"FAR_KEY": "sk-far"}) is None


async def test_one_upstream_in_place_of_the_engines_comes_last(tmp_path: Path) -> None:
    path = tmp_path / "millrace.toml"
    path.write_text(f'[gateway]\nupstream_url = "http://127.0.0.1:2/v1"\n{FILE}')
    found = make(load(path), {"FAR_KEY": "sk-far"})
    assert found is not None
    assert found.whole
    for model, dialect, engine in (
        ("far-1", "messages", "far"),
        ("policy", "chat", "openai"),
        ("far-1", "chat", "openai"),
    ):
        rule = found.route("policy", model, dialect)
        assert rule is not None
        assert found.chain(rule, dialect)[0].engine == engine
    with pytest.raises(ApiError, match="another API than messages"):
        found.route("policy", "policy", "messages")


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
