"""What `millrace config` shows of secrets that stand inside other values: nothing."""

from __future__ import annotations

import json

import pytest

from millrace.infra.config import Settings, mask_values
from millrace.infra.config.masking import STARS, in_arguments, in_text, in_values

SECRET = "hunter22-hunter22"


@pytest.mark.parametrize(
    "url",
    [
        f"https://user:{SECRET}@api.example.org/v1",
        f"https://:{SECRET}@api.example.org/v1",
        f"https://{SECRET}@api.example.org/v1",
        f"https://api.example.org/v1?api_key={SECRET}&x=1",
        f"https://api.example.org/v1?x=1&access-token={SECRET}",
        f"https://user:{SECRET}:{SECRET}@api.example.org",
    ],
)
def test_passwords_in_urls_are_stars(url: str) -> None:
    shown = in_text(url)
    assert SECRET not in shown
    assert "api.example.org" in shown
    assert SECRET not in json.dumps(mask_values(Settings(objects=url)))


@pytest.mark.parametrize(
    "arguments",
    [
        ("--api-key", SECRET),
        (f"--api-key={SECRET}",),
        ("--api-key", SECRET, SECRET),
        ("--hf-token", SECRET, "--port", "1"),
        ("--override", json.dumps({"password": SECRET})),
        ("--url", f"http://u:{SECRET}@h/"),
        ("-token", SECRET),
    ],
)
def test_secrets_in_arguments_are_stars(arguments: tuple[str, ...]) -> None:
    assert not any(SECRET in argument for argument in in_arguments(arguments))
    assert SECRET not in json.dumps(mask_values(Settings(engine={"args": arguments})))  # type: ignore[arg-type]


def test_everything_else_is_shown() -> None:
    plain = ["--dtype", "bfloat16", "--port", "8000", "http://127.0.0.1:8900/v1", "a@b", "me@example.org"]
    assert in_arguments(plain) == plain
    sizes = ["--tokenizer", "path/to", "--max-num-batched-tokens", "4096"]
    assert in_arguments(sizes) == sizes
    assert in_arguments(["--keyless", "--max-num-seqs", "4"]) == ["--keyless", "--max-num-seqs", "4"]
    url = "https://api.example.org/v1?limit=3#part"
    assert in_text(url) == url


def test_values_keep_their_shape_without_what_is_secret() -> None:
    url = f"https://user:{SECRET}@api.example.org/v1?api_key={SECRET}"
    given = {"token": SECRET, "rate": 0.5, "roles": [url, "actor"], "api_key": "", "inner": {"hf-token": SECRET}}
    shown = in_values(given)
    assert SECRET not in json.dumps(shown)
    assert shown["inner"] == {"hf-token": STARS}
    assert (shown["rate"], shown["roles"][1], shown["api_key"]) == (0.5, "actor", "")
    assert json.loads(json.dumps(shown)) == shown
