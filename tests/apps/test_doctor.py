"""The doctor on a healthy broker, and on storage that is not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millrace.apps import doctor
from millrace.apps.answers import Answer
from millrace.apps.doctor import examine
from millrace.infra.config import load
from millrace.infra.connect import connect
from millrace.infra.engines.vllm import launch
from millrace.infra.process.net import free_ports


@pytest.mark.slow
@pytest.mark.kafka
def test_broker_topics_and_clock(broker: str, tmp_path: Path) -> None:
    made = load(flags={"kafka.bootstrap": broker, "namespace": "doctor", "home": str(tmp_path)})
    before = {answer.question: answer for answer in examine(made)}
    assert before["topics"].word == "warning", "`up` makes them"
    assert "millrace topics" in before["topics"].said
    assert before["ports"].word == "bad"
    assert "another program listens" in before["ports"].said, "the broker of the tests is nobody's deployment"
    with connect(made) as bus:
        bus.ensure_topics(made.layout.specs())
    after = {answer.question: answer for answer in examine(made)}
    for question in ("broker", "topics", "clock against the broker", "shared storage", "java"):
        assert after[question].word == "ok", after[question]


@pytest.mark.parametrize(
    ("device", "gpu", "answer"),
    [
        ("auto", False, Answer("vllm runs on", "ok", "cpu")),
        ("auto", True, Answer("vllm runs on", "warning", launch.IDLE_GPU)),
        ("cpu", True, Answer("vllm runs on", "ok", "cpu")),
    ],
)
def test_a_gpu_that_stays_idle_is_a_warning(
    device: str, gpu: bool, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_is_installed", lambda package: package == launch.CPU_BUILD)
    monkeypatch.setattr(launch, "usable", lambda: gpu)
    answers = examine(load(flags={"engine.device": device, "kafka.local": False}))
    assert next(one for one in answers if one.question == answer.question) == answer


def test_a_build_that_does_not_fit_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_is_installed", lambda package: package == launch.CPU_BUILD)
    answers = examine(load(flags={"engine.device": "cuda", "kafka.local": False}))
    answer = next(one for one in answers if one.question == "vllm runs on")
    assert answer.word == "bad"
    assert "make setup ENGINE=gpu" in answer.said


@pytest.mark.parametrize("objects", ["file", "nosuch://x/y", "memory://x"])
def test_storage_that_cannot_hold_weights(objects: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    place = objects if "://" in objects else str(tmp_path / objects)
    made = load(flags={"objects": place, "kafka.bootstrap": "127.0.0.1:1", "engine.local": False})
    answers = examine(made)
    storage = next(answer for answer in answers if answer.question == "shared storage")
    assert storage.word == "bad"


@pytest.mark.parametrize(
    ("bootstrap", "protocol", "warned"),
    [
        ("127.0.0.1:1", "PLAINTEXT", False),
        ("10.9.8.7:1", "SASL_SSL", False),
        ("10.9.8.7:1", "SASL_PLAINTEXT", True),
        ("127.0.0.1:1,10.9.8.7:1", "plaintext", True),
    ],
)
def test_a_broker_beyond_this_machine_that_is_spoken_with_in_clear_is_warned_of(
    bootstrap: str, protocol: str, warned: bool
) -> None:
    flags = {"kafka.bootstrap": bootstrap, "kafka.local": False, "kafka.options": {"security.protocol": protocol}}
    assert [answer.word for answer in doctor._open(load(flags=flags))] == ["warning"] * warned


@pytest.mark.parametrize(
    ("url", "key", "warned"),
    [
        ("http://127.0.0.1:8901", "", False),
        ("http://[::1]:8901", "", False),
        ("http://10.9.8.7:8901", "", True),
        ("https://engine.example.org", "", True),
        ("http://10.9.8.7:8901", "a long random word", False),
    ],
)
def test_an_engine_beyond_this_machine_without_a_key_is_warned_of(url: str, key: str, warned: bool) -> None:
    made = load(flags={"engine.url": url, "engine.key": key, "engine.local": False})
    answers = [answer for answer in doctor._open(made) if answer.question == "engine key"]
    assert [(answer.word, url in answer.said) for answer in answers] == [("warning", True)] * warned


@pytest.mark.parametrize(
    ("exporter", "endpoint", "headers", "warned"),
    [
        ("otlp", "http://collector.example.org:4318", {"authorization": "Bearer word"}, True),
        ("otlp", "https://collector.example.org:4318", {"authorization": "Bearer word"}, False),
        ("otlp", "http://127.0.0.1:4318", {"authorization": "Bearer word"}, False),
        ("otlp", "http://collector.example.org:4318", {}, False),
        ("none", "http://collector.example.org:4318", {"authorization": "Bearer word"}, False),
    ],
)
def test_a_collector_that_is_told_a_token_in_clear_is_warned_of(
    exporter: str, endpoint: str, headers: dict[str, str], warned: bool
) -> None:
    flags = {"telemetry.exporter": exporter, "telemetry.endpoint": endpoint, "telemetry.headers": headers}
    answers = [answer for answer in doctor._open(load(flags=flags)) if answer.question == "telemetry"]
    assert [answer.word for answer in answers] == ["warning"] * warned
    assert not any("word" in answer.said for answer in answers), "the token is not shown"


@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        ({"engine.url": "http://engine.example.org:8000", "engine.key": "sk-word"}, ["[engine] key"]),
        ({"engine.url": "https://engine.example.org:8000", "engine.key": "sk-word"}, []),
        ({"engine.url": "http://127.0.0.1:8000", "engine.key": "sk-word"}, []),
        ({"engine.url": "http://engine.example.org:8000", "engine.key": ""}, []),
        (
            {"gateway.upstream_url": "http://models.example.org/v1", "gateway.upstream_key": "sk-word"},
            ["[gateway] upstream_key"],
        ),
        ({"gateway.upstream_url": "https://models.example.org/v1", "gateway.upstream_key": "sk-word"}, []),
        ({"gateway.upstreams": '{"far": {"url": "https://far.example.org/v1", "key_env": "FAR_KEY"}}'}, []),
        ({"gateway.upstreams": '{"far": {"url": "http://far.example.org/v1"}}'}, []),
        (
            {"gateway.upstreams": '{"far": {"url": "http://far.example.org/v1", "key_env": "FAR_KEY"}}'},
            ["[gateway.upstreams.far]"],
        ),
    ],
)
def test_a_key_that_travels_in_clear_is_warned_of(flags: dict[str, str], warned: list[str]) -> None:
    answers = [
        answer for answer in doctor._open(load(flags={"engine.local": False, **flags})) if "]" in answer.question
    ]
    assert [answer.question for answer in answers] == warned
    assert all(answer.word == "warning" and "https://" in answer.said for answer in answers)
    assert not any("word" in answer.said for answer in answers), "the key is not shown"


def test_what_up_has_not_started_yet_is_said_with_the_command(tmp_path: Path) -> None:
    [broker, engine, gateway] = free_ports(3)
    flags = {
        "home": str(tmp_path),
        "kafka.bootstrap": f"127.0.0.1:{broker}",
        "engine.url": f"http://127.0.0.1:{engine}",
        "gateway.port": gateway,
    }
    answers = {answer.question: answer for answer in examine(load(flags=flags))}
    for question in ("engine", "gateway"):
        assert answers[question].word == "warning"
        assert "not started yet: `millrace up`" in answers[question].said


@pytest.mark.parametrize(("mode", "word"), [(0o600, "ok"), (0o640, "warning"), (0o604, "warning")])
def test_settings_that_others_may_read_are_a_warning(mode: int, word: str, tmp_path: Path) -> None:
    file = tmp_path / "millrace.toml"
    file.write_text("")
    file.chmod(mode)
    answer = next(iter(examine(load(), file)))
    assert (answer.question, answer.word) == ("settings file", word)


@pytest.mark.parametrize("opened", ["home", "home/keys", "home/keys/engine", "login", "client.key", None])
def test_keys_and_a_home_that_others_may_read_are_a_warning(opened: str | None, tmp_path: Path) -> None:
    flags = {"home": str(tmp_path / "home"), "kafka.key_file": str(tmp_path / "login"), "kafka.local": False}
    made = load(flags=flags | {"kafka.options": json.dumps({"ssl.key.location": str(tmp_path / "client.key")})})
    (tmp_path / "home" / "keys").mkdir(parents=True)
    for path in (made.home, made.home / "keys"):
        path.chmod(0o700)
    for name in ("home/keys/engine", "login", "client.key"):
        (tmp_path / name).write_text("secret")
        (tmp_path / name).chmod(0o600)
    if opened:
        path = tmp_path / opened
        path.chmod(0o755 if path.is_dir() else 0o644)
    answer = next(one for one in examine(made) if one.question == "home and keys")
    assert answer.word == ("warning" if opened else "ok")
    assert answer.said.endswith(f"chmod go= {tmp_path / opened}" if opened else "yours alone")


@pytest.mark.parametrize(("config", "word"), [({"tie_word_embeddings": True}, "bad"), ({}, "ok"), (None, "ok")])
def test_a_version_that_the_engine_here_would_serve_wrongly_is_bad(
    config: dict[str, bool] | None, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "build_here", lambda _: "cpu")
    made = load(flags={"home": str(tmp_path), "objects": str(tmp_path / "objects"), "kafka.bootstrap": "127.0.0.1:1"})
    version = Path(made.weights.removeprefix("file://")) / "v0-0123456789ab"
    if config is not None:
        version.mkdir(parents=True)
        (version / "config.json").write_text(json.dumps(config))
    answer = next(one for one in examine(made) if one.question == "model")
    assert answer.word == word, answer
    if word == "bad":
        assert version.name in answer.said
        assert "--untie" in answer.said
