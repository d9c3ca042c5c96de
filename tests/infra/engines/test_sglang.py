"""SGLang beyond what every engine keeps: what it is started with, what it must not serve, what it refuses."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from millrace.infra.engines.base import Grammar, Sampling
from millrace.infra.engines.control import EngineLoad
from millrace.infra.engines.kind import AdapterRoom, Device, LocalEngine
from millrace.infra.engines.sglang import launch as module
from millrace.infra.engines.sglang.control import SglangControl
from millrace.infra.engines.sglang.engine import SglangEngine
from millrace.infra.engines.sglang.launch import Sglang
from millrace.infra.engines.sglang.wire import AnswerReader, read_notice
from millrace.infra.errors import EngineError, EngineRejected, EngineUnavailable, ServiceError
from millrace.schemas.labels import MIXED
from tests.support.engines import complete, differences
from tests.support.fake_http import answer, serving
from tests.support.tiny_model import write_manifest

PROMPT = [22, 10, 14, 40]
EXACT = 1e-5
real = [pytest.mark.slow, pytest.mark.sglang]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
NOTICE = {"incarnation": "1", "label": "p@1", "is_paused": False, "model_type": "qwen2", "ranks": 1, "replicas": 1}


def local(folder: Path, device: Device = "cpu", **options: object) -> Sglang:
    """A server of a model that is a configuration alone."""
    (folder / "config.json").write_text("{}")
    return Sglang(LocalEngine(folder / "home", "http://127.0.0.1:1234", str(folder), "tiny", device, **options))  # type: ignore[arg-type]


@pytest.fixture
def installed(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's environment is there, and a GPU."""
    python = tmp_path_factory.mktemp("environment") / "python"
    python.touch()
    monkeypatch.setattr(module, "PYTHON", python)
    monkeypatch.setattr(module, "usable", lambda: True)


@pytest.mark.usefixtures("installed")
def test_a_key_stands_in_a_file_of_its_own(tmp_path: Path) -> None:
    server = local(tmp_path, key='a "secret"')
    server.prepare()
    assert not [word for word in server.command() if "secret" in word]
    assert "secret" not in str(server.environment())
    options = tmp_path / "home" / "options.yaml"
    assert options.read_text() == 'api-key: "a \\"secret\\""\n'
    assert options.stat().st_mode & 0o077 == 0
    assert str(options) in server.command()


@pytest.mark.usefixtures("installed")
def test_adapters_are_served_on_a_gpu_alone(tmp_path: Path) -> None:
    room = AdapterRoom(12, 5)
    words = " ".join(local(tmp_path, "cuda", adapters=room, args=("--tp", "2")).command())
    assert "--enable-lora --max-lora-rank 12" in words
    assert words.endswith("--tp 2")
    assert "float32" not in words
    with pytest.raises(ServiceError, match="no adapters on a CPU"):
        local(tmp_path, adapters=room).prepare()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("limit", "asked", "length"), [(1024, 512, 514), (1024, 1023, 1024), (1024, 1024, 1024), (0, 9, 11)]
)
def test_a_context_is_no_longer_than_the_models(tmp_path: Path, limit: int, asked: int, length: int) -> None:
    """SGLang does not start with a longer one, and never fills the last two tokens."""
    server = local(tmp_path, max_model_len=asked)
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": limit} if limit else {}))
    words = server.command()
    assert words[words.index("--context-length") + 1] == str(length)


def test_what_is_not_installed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PYTHON", tmp_path / "none")
    with pytest.raises(ServiceError, match="make setup ENGINE=sglang"):
        local(tmp_path)


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (404, b"{}", "install Millrace in its environment"),
        (200, json.dumps({**NOTICE, "sglang": "0.5.20"}).encode(), "is SGLang 0.5.20: Millrace knows 0.5.21 and later"),
        (200, json.dumps({**NOTICE, "sglang": "0.6.0"}).encode(), "is SGLang 0.6.0"),
        (200, b"{}", "another version of Millrace's plugin"),
    ],
)
async def test_a_server_that_would_sample_otherwise_is_not_asked(status: int, body: bytes, says: str) -> None:
    async with serving(answer(body, status)) as server:
        engine = SglangEngine(server.url, patience_s=0)
        for stream in (True, False):
            with pytest.raises(EngineUnavailable, match=says):
                await complete(engine, PROMPT, Sampling(4), stream=stream)
        with pytest.raises(EngineUnavailable, match=says):
            await engine.weight_version()
        control = SglangControl(server.url)
        with pytest.raises(EngineUnavailable, match=says):
            await control.state()
        await control.close()
        await engine.close()
        assert {head.split()[1] for head, _ in server.requests} == {"/millrace"}, "nothing else is asked of it"


async def test_its_load_is_read_over_its_replicas() -> None:
    replicas = [
        {"dp_rank": 0, "num_running_reqs": 3, "token_usage": 0.5, "gen_throughput": 100.0},
        {"dp_rank": 1, "num_waiting_reqs": 2, "gen_throughput": 50.5},
    ]
    bodies = [json.dumps({"loads": replicas}).encode(), b'{"detail": "Not Found"}', b"[]"]
    async with serving(answer(bodies[0]), answer(bodies[1], 404), answer(bodies[2])) as server:
        control = SglangControl(server.url)
        assert await control.occupancy() == EngineLoad(3, 2, 0.75, 150.5)
        assert await control.occupancy() is None
        assert await control.occupancy() is None
        await control.close()


def test_a_key_that_is_not_right_is_called_so() -> None:
    with pytest.raises(EngineUnavailable, match=r"asks for another key than \[engine\] key"):
        read_notice(401, b"{}", "u")


def test_versions_from_which_nothing_is_missing_are_known() -> None:
    for version in ("0.5.21", "0.5.23.post1", "0.5.30rc1"):
        assert read_notice(200, json.dumps({**NOTICE, "sglang": version}).encode(), "u").label == "p@1"


@pytest.mark.parametrize(
    "meta",
    [
        {"completion_tokens": 2, "output_token_logprobs": [[-1.0, 5, None]]},
        {"completion_tokens": 2, "output_token_logprobs": [[-1.0, 5, None], [-1.0, 7, None]]},
        {"completion_tokens": 2, "output_token_logprobs": [[-1.0, 5, None], [None, 6, None]]},
        {"completion_tokens": 3, "output_token_logprobs": [[-1.0, 5, None], [-1.0, 6, None]]},
    ],
)
def test_tokens_without_their_logprobs_pass_for_no_answer(meta: dict[str, object]) -> None:
    read = AnswerReader(Sampling(9), "u")
    with pytest.raises(EngineUnavailable, match="cannot be trained on"):
        read(json.dumps({"output_ids": [5, 6], "meta_info": meta}).encode())


def test_streams_of_all_tokens_so_far_and_of_new_ones_are_read_alike() -> None:
    def event(*ids: int, count: int) -> bytes:
        meta = {"completion_tokens": count, "output_token_logprobs": [[-token, token, None] for token in ids]}
        return json.dumps({"output_ids": ids, "meta_info": meta}).encode()

    whole, fresh = AnswerReader(Sampling(9), "u"), AnswerReader(Sampling(9), "u")
    for so_far, new, count in (((5,), (5,), 1), ((5, 6, 7), (6, 7), 3), ((5, 6, 7), (), 3)):
        chunks = [read(event(*ids, count=count))[0] for read, ids in ((whole, so_far), (fresh, new))]
        assert chunks[0] == chunks[1]
        assert chunks[0][0].token_ids == list(new)


def test_what_was_ended_in_the_queue_has_no_version_that_it_could_be_trained_as() -> None:
    read = AnswerReader(Sampling(9), "u")
    first = {"completion_tokens": 1, "output_token_logprobs": [[-1.0, 5, None]]}
    read(json.dumps({"output_ids": [5], "meta_info": first}).encode())
    ended = {"finish_reason": {"type": "abort", "message": "Aborted"}, "completion_tokens": 1}
    ((chunk,), usage) = read(json.dumps({"meta_info": ended}).encode())
    assert (chunk.finish_reason, chunk.token_ids, [span.label for span in chunk.spans]) == ("abort", [], [MIXED])
    assert usage is not None


# ---------------------------------------------------------------------- the real server


@pytest.fixture
async def control(sglang: Sglang) -> AsyncIterator[SglangControl]:
    one = SglangControl(sglang.url)
    yield one
    await one.pause("abort")
    await one.load(Path(sglang.model))
    await one.set_version("default")
    await one.reset_prefix_cache()
    await one.resume()
    await one.close()


@pytest.fixture
async def engine(sglang: Sglang) -> AsyncIterator[SglangEngine]:
    one = SglangEngine(sglang.url)
    yield one
    await one.close()


class TestServer:
    pytestmark = real

    @pytest.mark.parametrize("stream", [True, False])
    async def test_grammars(self, engine: SglangEngine, models: tuple[Path, Path], stream: bool) -> None:
        tokenizer = AutoTokenizer.from_pretrained(models[0])
        form = [
            {"type": "const_string", "value": "<t>"},
            {"type": "json_schema", "json_schema": SCHEMA},
            {"type": "const_string", "value": "</t>"},
        ]
        tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": form}}
        for grammar in (Grammar("json", json.dumps(SCHEMA)), Grammar("structural_tag", json.dumps(tag))):
            (choice,) = await complete(engine, PROMPT, Sampling(200, seed=1, grammar=grammar), stream=stream)
            assert choice.finish_reason == "stop"
            text = tokenizer.decode(choice.token_ids[:-1])
            if grammar.kind == "structural_tag":
                text = text.removeprefix("<t>").removesuffix("</t>")
            assert json.loads(text).keys() == {"a", "b"}

    @pytest.mark.parametrize("stream", [True, False])
    async def test_a_grammar_that_cannot_be_is_refused(self, engine: SglangEngine, stream: bool) -> None:
        patterns = ["^(a|b", r"\p{Han}+", "[z-a]", "\\"]
        schemas = [{"$ref": "#"}, {"type": "nonsense"}, *({"type": "string", "pattern": one} for one in patterns)]
        grammars = [Grammar("json", json.dumps(schema)) for schema in schemas]
        for grammar in (*grammars, Grammar("structural_tag", "none")):
            with pytest.raises(EngineRejected) as refused:
                await complete(engine, PROMPT, Sampling(4, grammar=grammar), stream=stream)
            assert refused.value.status == 400

    async def test_it_says_what_it_has_to_do(self, control: SglangControl, engine: SglangEngine) -> None:
        call = asyncio.create_task(complete(engine, PROMPT, Sampling(400, ignore_eos=True)))
        seen: list[EngineLoad] = []
        while not call.done():
            load = await control.occupancy()
            assert load is not None
            seen.append(load)
            await asyncio.sleep(0.02)
        await call
        assert max(load.running + load.waiting for load in seen) == 1
        assert all(load.free_cache is not None and 0 <= load.free_cache <= 1 for load in seen)

    async def test_a_request_that_bears_the_id_of_one_that_ended_is_not_ended_with_it(
        self, engine: SglangEngine
    ) -> None:
        """SGLang ends what bears the id of a stream 2 s after that stream."""
        await complete(engine, PROMPT, Sampling(1), request_id="one")
        (choice,) = await complete(engine, PROMPT, Sampling(500, ignore_eos=True), request_id="one")
        assert choice.finish_reason == "length"

    async def test_what_lacks_weights_of_the_model_is_not_said_to_be_loaded(
        self, control: SglangControl, engine: SglangEngine, models: tuple[Path, Path], tmp_path: Path
    ) -> None:
        """SGLang answers success, and would sample from a mixture of two versions."""
        half = Path(shutil.copytree(models[1], tmp_path / "half"))
        weights = load_file(half / "model.safetensors")
        del weights["model.layers.1.self_attn.k_proj.bias"]
        save_file(weights, half / "model.safetensors", {"format": "pt"})
        write_manifest(half)
        await control.pause()
        with pytest.raises(EngineError, match=r"does not determine 0:model\.layers\.1\.self_attn\.qkv_proj\.bias"):
            await control.load(half)
        await control.load(models[1])
        assert await control.reset_prefix_cache()
        await control.resume()
        (choice,) = await complete(engine, PROMPT, Sampling(20, ignore_eos=True))
        assert max(differences(models[1], PROMPT, choice.token_ids, choice.logprobs)) < EXACT

    async def test_another_architecture_is_refused_before_anything_changes(
        self, control: SglangControl, models: tuple[Path, Path], tmp_path: Path
    ) -> None:
        other = Path(shutil.copytree(models[1], tmp_path / "other"))
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps({**config, "model_type": "qwen3"}))
        assert "serves qwen2: SGLang would mix the two" in (await control.refusal(other) or "")
        assert await control.refusal(models[1]) is None

    async def test_adapters_are_refused_by_name_where_none_are_served(
        self, control: SglangControl, tmp_path: Path
    ) -> None:
        with pytest.raises(EngineRejected, match=r"takes no adapters: start SGLang with --enable-lora, on a GPU"):
            await control.load_adapter("p@1", tmp_path)
        assert await control.adapters() == ()
