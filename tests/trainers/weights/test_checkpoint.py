from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from millrace.apps.demo import tiny
from millrace.trainers.algorithms.registry import policy
from millrace.trainers.backends.models.build import with_scalar_head
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.errors import CheckpointError, CorruptCheckpoint
from millrace.trainers.learning import Schedule, Trainer
from millrace.trainers.weights import checkpoint, manifest
from millrace.trainers.weights.state import State
from tests.support.samples import random_samples, small_state
from tests.support.steps import train_share

POINTS = [
    "checkpoint.between_files",
    "checkpoint.after_write",
    "checkpoint.after_fsync",
    "checkpoint.before_rename",
    "checkpoint.after_rename",
    "checkpoint.after_parent_fsync",
]


@pytest.fixture(scope="module")
def trained() -> State:
    """A state with moments."""
    backend = TorchBackend(device="cpu")
    backend.form(0, 1, None, 30.0)
    backend.load(small_state())
    train_share(Trainer(backend, policy("grpo"), Schedule(1e-3)), random_samples(0), 0, 1)
    state = backend.gather()
    backend.tear_down()
    assert state is not None
    assert state.moments.keys() == {"exp_avg", "exp_avg_sq"}
    return state


def test_what_is_read_is_what_was_written(trained: State, tmp_path: Path) -> None:
    written = checkpoint.write(tmp_path, 3, trained)
    assert written.path == tmp_path / f"v3-{written.digest[:12]}"
    assert sorted(written.files) == sorted(p.name for p in written.path.iterdir() if p.name != "manifest.json")
    back = checkpoint.read(written.path, digest=written.digest)
    assert (back.step, back.seed, back.assets) == (trained.step, trained.seed, trained.assets)
    assert checkpoint.fingerprint(back) == checkpoint.fingerprint(trained)
    assert list(tmp_path.iterdir()) == [written.path]
    assert written.digest == checkpoint.fingerprint(trained), "files are what they would be in memory"
    assert {path.stat().st_mode for path in written.path.iterdir()} == {(written.path / "config.json").stat().st_mode}


def test_equal_states_have_equal_digests_and_a_name_is_never_overwritten(trained: State, tmp_path: Path) -> None:
    first = checkpoint.write(tmp_path, 1, trained)
    before = (first.path / "manifest.json").stat()
    assert checkpoint.write(tmp_path, 1, trained) == first
    assert (first.path / "manifest.json").stat().st_ino == before.st_ino
    assert checkpoint.write(tmp_path, 2, trained).digest == first.digest
    other = checkpoint.write(tmp_path, 1, small_state(seed=1))
    assert other.path != first.path
    manifest.verify(first.path, first.digest)


def test_a_damaged_directory_of_the_same_name_is_replaced(trained: State, tmp_path: Path) -> None:
    first = checkpoint.write(tmp_path, 1, trained)
    (first.path / "model.safetensors").write_bytes(b"")
    manifest.verify(checkpoint.write(tmp_path, 1, trained).path, first.digest)


def test_transformers_loads_it(tmp_path: Path) -> None:
    state = tiny.random_state(0)
    path = checkpoint.write(tmp_path, 0, state).path
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.dtype == torch.float32
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, state.weights[name])
    tokenizer = AutoTokenizer.from_pretrained(path)
    chat = [{"role": "user", "content": "352041"}]
    assert tokenizer.apply_chat_template(chat, return_dict=False) == tiny.encode("352041")
    assert model.generation_config.eos_token_id == tiny.EOS


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "state.tensors", "training.json", "config.json"])
@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
def test_a_damaged_file_is_named(trained: State, tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    path = checkpoint.write(tmp_path, 1, trained).path
    damage(path / name)
    with pytest.raises(CorruptCheckpoint, match=name):
        checkpoint.read(path)


@pytest.mark.parametrize("name", ["model.safetensors", "state.tensors", "training.json"])
@pytest.mark.parametrize("damage", [truncate, Path.unlink])
def test_unverified_reads_fail_clearly_too(
    trained: State, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    path = checkpoint.write(tmp_path, 1, trained).path
    damage(path / name)
    with pytest.raises(CorruptCheckpoint, match="use another version"):
        checkpoint.read(path, verify=False)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b'{"files": []}', b'{"files": {"../../etc/passwd": "00"}}'],
)
def test_a_damaged_manifest_is_named(trained: State, tmp_path: Path, content: bytes) -> None:
    path = checkpoint.write(tmp_path, 1, trained).path
    (path / "manifest.json").write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match=r"manifest\.json"):
        checkpoint.read(path)


def test_another_digest_and_no_directory_are_refused(trained: State, tmp_path: Path) -> None:
    path = checkpoint.write(tmp_path, 1, trained).path
    with pytest.raises(CorruptCheckpoint, match="expected 000000000000"):
        checkpoint.read(path, digest="0" * 64)
    with pytest.raises(CorruptCheckpoint, match="not a finished weight directory"):
        checkpoint.read(tmp_path / "v9-nowhere")


def test_a_full_disk_leaves_nothing_behind(trained: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(
        CheckpointError, match=r"version 1 cannot be written to .* \(No space left on device\): make room"
    ):
        checkpoint.write(tmp_path, 1, trained)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("point", POINTS)
def test_an_error_at_any_point_leaves_all_or_nothing(trained: State, tmp_path: Path, point: str) -> None:
    def fail(at: str) -> None:
        if at == point:
            raise RuntimeError(at)

    with pytest.raises(RuntimeError, match=point):
        checkpoint.write(tmp_path, 1, trained, fault=fail)
    for path in tmp_path.iterdir():
        manifest.verify(path)
    manifest.verify(checkpoint.write(tmp_path, 1, trained).path)


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from millrace.trainers.weights import checkpoint
from millrace.trainers.weights.state import State

root, *points = sys.argv[1:]
state = State({"w": torch.arange(1000.0)}, {"config.json": b'{"model_type": "qwen2"}'})
for point in points:
    child = os.fork()
    if child == 0:
        fault = lambda at: at == point and os.kill(os.getpid(), signal.SIGKILL)
        checkpoint.write(Path(root) / point, 1, state, fault=fault)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
def test_killed_in_mid_save(tmp_path: Path) -> None:
    """A real SIGKILL at each point: what has a name is whole; the next save succeeds; the leftovers can be swept."""
    ran = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), *POINTS], capture_output=True, check=True)
    assert ran.stdout.split() == [str(-signal.SIGKILL).encode()] * len(POINTS)
    state = State({"w": torch.arange(1000.0)}, {"config.json": b'{"model_type": "qwen2"}'})
    for point in POINTS:
        root = tmp_path / point
        named = list(root.glob("v*"))
        assert len(named) == (point in POINTS[-2:])
        for path in named:
            manifest.verify(path)
        written = checkpoint.write(root, 1, state)
        manifest.verify(written.path, written.digest)
        checkpoint.sweep(root, older_than=-1)
        assert list(root.iterdir()) == [written.path]


def test_bf16_is_served_and_fp32_is_kept(trained: State, tmp_path: Path) -> None:
    config = {**json.loads(trained.assets["config.json"]), "dtype": "bfloat16"}
    state = State(trained.weights, {"config.json": json.dumps(config).encode()}, trained.moments, trained.step)
    path = checkpoint.write(tmp_path, 1, state).path
    assert AutoModelForCausalLM.from_pretrained(path).dtype == torch.bfloat16
    back = checkpoint.read(path)
    for name, weight in trained.weights.items():
        assert torch.equal(back.weights[name], weight)
    assert back.moments.keys() == trained.moments.keys()


def test_adopting_a_sharded_tied_model(tmp_path: Path) -> None:
    state = small_state(tie_word_embeddings=True)
    names = sorted(state.weights)
    for index, chunk in enumerate((names[:5], names[5:])):
        save_file({name: state.weights[name].bfloat16() for name in chunk}, tmp_path / f"model-0000{index}.safetensors")
    head = state.weights["model.embed_tokens.weight"].bfloat16()
    save_file({"lm_head.weight": head}, tmp_path / "model-00002.safetensors")
    (tmp_path / "config.json").write_bytes(state.assets["config.json"])
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    adopted = checkpoint.adopt(tmp_path, seed=4)
    assert adopted.weights.keys() == state.weights.keys()
    assert adopted.assets.keys() == {"config.json", "tokenizer.json"}
    assert all(weight.dtype == torch.float32 for weight in adopted.weights.values())
    assert (adopted.step, adopted.seed, adopted.moments) == (0, 4, {})
    save_file({"lm_head.weight": head + 1}, tmp_path / "model-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"ties lm_head\.weight .* differ: set tie_word_embeddings to false"):
        checkpoint.adopt(tmp_path)


def test_adopting_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no Hugging Face model directory"):
        checkpoint.adopt(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(CorruptCheckpoint, match="cannot be read"):
        checkpoint.adopt(tmp_path)


def test_adopting_a_version_starts_anew_from_its_weights(trained: State, tmp_path: Path) -> None:
    adopted = checkpoint.adopt(checkpoint.write(tmp_path, 5, trained).path)
    assert (adopted.step, adopted.moments, adopted.assets) == (0, {}, trained.assets)


def test_unknown_dtypes_are_refused(trained: State, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="dtype"):
        checkpoint.write(tmp_path, 1, State(trained.weights, {"config.json": b'{"dtype": "float7"}'}))


def test_the_hash_of_a_part_of_the_files(tmp_path: Path) -> None:
    state = tiny.random_state(0)
    one = manifest.load(checkpoint.write(tmp_path, 0, state).path)
    other = manifest.load(checkpoint.write(tmp_path, 0, tiny.random_state(1)).path)
    names = ("tokenizer.json", "tokenizer_config.json", "absent.txt")
    assert manifest.subset_hash(one, names) == manifest.subset_hash(other, names)
    assert manifest.subset_hash(one, ("model.safetensors",)) != manifest.subset_hash(other, ("model.safetensors",))
    with pytest.raises(CheckpointError, match="save the tokenizer"):
        manifest.subset_hash(one, ("absent.txt",))


def test_a_critic_lies_beside_the_policy_and_engines_do_not_load_it(trained: State, tmp_path: Path) -> None:
    critic = with_scalar_head(trained)
    moments = {slot: {name: torch.ones_like(w) for name, w in critic.weights.items()} for slot in trained.moments}
    whole = replace(trained, critic=replace(critic, moments=moments, step=7))
    path = checkpoint.write(tmp_path, 1, whole).path
    back = checkpoint.read(path)
    assert back.critic is not None
    assert (back.critic.step, back.critic.assets) == (7, critic.assets)
    assert checkpoint.fingerprint(back) == checkpoint.fingerprint(whole) != checkpoint.fingerprint(trained)
    assert [p.name for p in path.glob("*.safetensors")] == ["model.safetensors"]
    assert checkpoint.adopt(path).critic is None
    truncate(path / "critic.tensors")
    with pytest.raises(CorruptCheckpoint, match=r"critic\.tensors"):
        checkpoint.read(path)
    with pytest.raises(CorruptCheckpoint, match="use another version"):
        checkpoint.read(path, verify=False)
