"""The control of vLLM against a server that misbehaves."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from millrace.infra.engines import control as controls
from millrace.infra.engines.control import EngineLoad, EngineState
from millrace.infra.engines.vllm.control import VllmControl
from millrace.infra.errors import EngineError, EngineRejected, EngineTimeout, EngineUnavailable
from tests.support.fake_http import FakeServer, Script, answer, hang_up, serving, stay_silent

METRICS = b"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds 1.79525815036e+09\n"


def label(text: str) -> Script:
    return answer(json.dumps({"weight_version": text}).encode())


RUNNING = answer(b'{"is_paused":false}')


@asynccontextmanager
async def control(*scripts: Script, timeout_s: float = 10) -> AsyncIterator[tuple[VllmControl, FakeServer]]:
    async with serving(*scripts) as fake:
        found = VllmControl(fake.url, timeout_s=timeout_s)
        yield found, fake
        await found.close()


async def test_metrics_are_read_only_when_the_label_surprises() -> None:
    later = METRICS.replace(b"1.79525815036e+09", b"1795258199.5")
    scripts = [
        label("default"),
        RUNNING,
        answer(METRICS),
        label("default"),
        RUNNING,
        answer(b"{}"),
        label("p@1"),
        RUNNING,
    ]
    scripts += [label("default"), RUNNING, answer(later)]
    async with control(*scripts) as (found, fake):
        first = await found.state()
        assert first == EngineState("1795258150.360000", "default", False)
        assert await found.state() == first
        await found.set_version("p@1")
        assert await found.state() == EngineState(first.incarnation, "p@1", False)
        assert (await found.state()).incarnation == "1795258199.500000"
    assert [head.split()[1] for head, _ in fake.requests].count("/metrics") == 2


async def test_its_load_is_read_from_its_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    def page(tokens: int) -> Script:
        lines = [
            "# TYPE vllm:num_requests_running gauge",
            'vllm:num_requests_running{engine="0",model_name="m"} 3.0',
            'vllm:num_requests_running{engine="1",model_name="m"} 2.0',
            'vllm:num_requests_waiting{engine="0",model_name="m"} 1.0',
            'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0',
            'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25',
            'vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75',
            f'vllm:generation_tokens_total{{engine="0",model_name="m"}} {tokens}.0',
        ]
        return answer("\n".join(lines).encode())

    times = iter([10.0, 12.0, 14.0])
    monkeypatch.setattr(controls, "time", SimpleNamespace(monotonic=lambda: next(times)))
    async with control(page(100), page(300), page(0), answer(b"nothing 1")) as (found, _):
        assert await found.occupancy() == EngineLoad(5, 1, 0.5, None)
        assert await found.occupancy() == EngineLoad(5, 1, 0.5, 100.0)
        assert await found.occupancy() == EngineLoad(5, 1, 0.5, None), "it counts anew: another start"
        assert await found.occupancy() is None


async def test_a_server_whose_restarts_cannot_be_noticed_is_refused() -> None:
    async with control(label("default"), RUNNING, answer(b"nothing 1\n")) as (found, _):
        with pytest.raises(EngineError, match="restarts could not be noticed"):
            await found.state()


@pytest.mark.parametrize(("body", "done"), [(b'{"success":true}', True), (b'{"success":false}', False), (b"{}", False)])
async def test_a_reset_is_believed_by_its_body_alone(body: bytes, done: bool) -> None:
    async with control(answer(body)) as (found, fake):
        assert await found.reset_prefix_cache() is done
    assert "reset_running_requests=true" in fake.requests[0][0]


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (answer(b"no", 404), EngineRejected),
        (answer(b"dead", 500), EngineError),
        (hang_up, EngineUnavailable),
        (stay_silent, EngineTimeout),
        (answer(b"[]"), EngineError),
    ],
)
async def test_failures_have_names(script: Script, kind: type[EngineError]) -> None:
    async with control(script, timeout_s=0.3 if kind is EngineTimeout else 60) as (found, _):
        with pytest.raises(kind):
            await found.resume()


async def test_a_broken_connection_is_tried_again() -> None:
    async with control(hang_up, hang_up, answer(b'{"status":"paused"}')) as (found, fake):
        await found.pause("keep")
        assert len(fake.requests) == 3


@pytest.mark.parametrize(
    ("about", "refused"),
    [
        (answer(b'{"vllm_config":"x, device_config=cpu, y"}'), True),
        (answer(b'{"vllm_config":"device_config=cuda"}'), False),
        (answer(b"no such route", 404), False),
    ],
)
@pytest.mark.parametrize(
    ("config", "advice"),
    [('{"tie_word_embeddings": true}', "tie_word_embeddings=false"), ('{"num_experts": 8}', "mixture of experts")],
)
async def test_what_reloads_wrongly_is_refused_on_a_cpu_alone(
    tmp_path: Path, about: Script, refused: bool, config: str, advice: str
) -> None:
    (tmp_path / "config.json").write_text(config)
    async with control(about) as (found, _):
        reason = await found.refusal(tmp_path)
        assert (reason is not None and advice in reason) is refused


async def test_an_engine_whose_device_is_known_is_not_asked(tmp_path: Path) -> None:
    """vLLM's answer calls pip or uv, which may be missing where it runs."""
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    async with control(answer(b"", 500)) as (found, fake):
        assert "does not say what it runs on" in str(await found.refusal(tmp_path))
        asked = len(fake.requests)
        for on_cpu in (True, False):
            known = VllmControl(found.url, on_cpu=on_cpu)
            assert (await known.refusal(tmp_path) is not None) is on_cpu
            await known.close()
        assert len(fake.requests) == asked


async def test_other_models_are_never_asked_about(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": false, "num_experts": null}')
    async with control(answer(b"")) as (found, fake):
        assert await found.refusal(tmp_path) is None
        assert await found.refusal(tmp_path / "vanished") is None
    assert not fake.requests


async def test_requests_are_aborted_by_the_names_that_vllm_gives_them() -> None:
    async with control(answer(b'{"status":"aborted","aborted":2}')) as (found, fake):
        assert await found.abort(["a"]) == 2
        assert await found.abort() == 2
    assert [json.loads(body) for _, body in fake.requests] == [{"request_ids": ["generate-tokens-a"]}, {}]
