"""A version on disk: Hugging Face layout plus the training state, durable before it has a name.

    v{n}-{digest12}/
        config.json, tokenizer, chat template ...    carried on from the parent, byte for byte
        model.safetensors                            weights in config.json's dtype and constants, as transformers
                                                     names and lays them out for engines
        state.tensors                                moments; fp32 weights and constants where the above are not fp32
        training.json                                optimizer steps, seed
        critic.tensors, critic.json                  the critic's weights, moments, configuration, where there is one
        adapter_config.json, adapter_model.safetensors   in place of model.safetensors, where the adapter is published
        manifest.json                                sha256 of each file

Invariants: a directory appears under its name by one rename, after its files and its own entries are fsynced, so a name
means whole content; the name holds the digest, so a leader that was replaced can never overwrite another's bytes; equal
states give equal bytes. Ranks of any number can load it: tensors are full. With LoRA, state.tensors holds the adapter
and its moments, and training.json names the directory of the frozen base, which must stay where it is.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save, save_file

from millrace.infra import durable
from millrace.trainers.errors import CheckpointError, CorruptCheckpoint
from millrace.trainers.weights import lora, manifest
from millrace.trainers.weights.adapter import Adapter, Lora
from millrace.trainers.weights.hugging_face import flatten_templates
from millrace.trainers.weights.manifest import Manifest
from millrace.trainers.weights.state import State, dtype_of

WEIGHTS, MOMENTS, TRAINING = "model.safetensors", "state.tensors", "training.json"
CRITIC, CRITIC_TRAINING = "critic.tensors", "critic.json"
ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
"""*.tensors are safetensors too, under another ending: engines load every *.safetensors of a directory as weights."""
_OWN_FILES = {MOMENTS, TRAINING, CRITIC, CRITIC_TRAINING, ADAPTER_CONFIG, ADAPTER, manifest.NAME}
_MASTER, _CONSTANT, _ADAPTER = "master", "constant", "adapter"
_HEAD = "lm_head.weight"
_PLAIN = frozenset({"gemma", "gemma2", "llama", "mistral", "qwen2", "qwen3"})
"""kinds of models whose files hold the weights by the model's own names, and nothing else: they are read and written
without transformers, which takes seconds to load"""
_PLAIN_NAMES = frozenset({"model.embed_tokens.weight", "model.norm.weight", _HEAD})
_PEFT = "base_model.model."
"""before every name in a file of peft"""

_PT = {"format": "pt"}
"""metadata of every tensor file"""

Fault = Callable[[str], None]
FileContent = bytes | Mapping[str, torch.Tensor]
"""of a file: its bytes, or the tensors of a safetensors file"""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A finished weight directory. digest: sha256 hex of its manifest; files: name -> sha256 hex."""

    path: Path
    digest: str
    files: Mapping[str, str]


def _no_fault(_: str) -> None:
    """The default fault point: nothing happens."""


def write(root: Path, version: int, state: State, *, fault: Fault = _no_fault) -> Checkpoint:
    """Writes `state` durably as version `version` under `root`; returns what the weight event says of it.

    `fault` is called with the name of each point at which a crash must be harmless. Raises CheckpointError when the
    disk is full or gone; then nothing but a temporary directory, removed if possible, is left.
    """
    temporary = durable.draft_of(root / f"v{version}")
    try:
        durable.make_folder(root)
        listing = _fill(temporary, state, fault)
        target = root / f"v{version}-{listing.digest[:12]}"
        fault("checkpoint.before_rename")
        if _is_whole(target, listing.digest):
            durable.flush(root)  # whoever wrote it may not have come so far
        else:
            damage = temporary.with_name(f"{temporary.name}-damaged") if target.exists() else None
            durable.rename(temporary, target, backup=damage, on_step=lambda _: fault("checkpoint.after_rename"))
        fault("checkpoint.after_parent_fsync")
    except OSError as error:
        raise CheckpointError(
            f"version {version} cannot be written to {root} ({error.strerror or error}): make room there, or mend it, "
            "and start again; no version was lost"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Checkpoint(target, listing.digest, listing.files)


def _fill(directory: Path, state: State, fault: Fault) -> Manifest:
    directory.mkdir()
    files = {**_huggingface(state), **_training(state, directory.parent)}
    for name, content in files.items():
        _put(directory / name, content)
        fault("checkpoint.between_files")
    listing = Manifest({name: manifest.file_hash(directory / name) for name in sorted(files)})
    (directory / manifest.NAME).write_bytes(listing.to_bytes())
    fault("checkpoint.after_write")
    durable.flush_all(directory)
    fault("checkpoint.after_fsync")
    return listing


def _is_whole(target: Path, digest: str) -> bool:
    """Whether the same bytes were written before, by a step that was never committed."""
    try:
        manifest.verify(target, digest)
    except CorruptCheckpoint:
        return False
    return True


def export(directory: Path, state: State) -> None:
    """Writes the Hugging Face layout alone (no training state) into `directory`: a model to start from."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in _huggingface(state).items():
        _put(directory / name, content)


def _put(path: Path, content: FileContent) -> None:
    """Writes a file. Tensors go from where they are, without a copy in memory and without holding up other threads,
    which `save` does. Raises OSError."""
    if isinstance(content, bytes):
        path.write_bytes(content)
        return
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(dict(content), path, metadata=_PT)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    path.chmod(mode)  # safetensors makes files that their owner alone may read, and engines may be another user's


def _bytes(content: FileContent) -> bytes:
    """What `_put` writes."""
    return content if isinstance(content, bytes) else bytes(save(dict(content), metadata=_PT))


def read(directory: Path, *, verify: bool = True, digest: str | None = None) -> State:
    """The state in a weight directory. verify: check all hashes first (and the manifest against `digest`). Raises
    CorruptCheckpoint, naming the file, when something is missing, truncated or changed."""
    listing = manifest.verify(directory, digest) if verify else manifest.load(directory)
    critic = None
    try:
        training = json.loads((directory / TRAINING).read_bytes())
        extra = load_file(directory / MOMENTS)
        weights = {} if "lora" in training else load_file(directory / WEIGHTS)
        step, seed = int(training["step"]), int(training["seed"])
        if CRITIC in listing.files:
            critic = _read_critic(directory)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CorruptCheckpoint(f"{directory} cannot be read ({error}); restore it or use another version") from error
    moments = _by_slot(extra)
    assets = {
        name: (directory / name).read_bytes() for name in listing.files if name not in _OWN_FILES and name != WEIGHTS
    }
    if "lora" in training:
        adapter = _read_adapter(directory, training["lora"], moments.pop(_ADAPTER))
        base = adopt(adapter.base)
        return State(base.weights, assets, moments, step, seed, critic, adapter, constants=base.constants)
    masters, constants = moments.pop(_MASTER, {}), moments.pop(_CONSTANT, {})
    if not masters:
        masters, constants = _convert(assets["config.json"], weights)
    return State(masters, assets, moments, step, seed, critic, source=directory, constants=constants)


def _convert(
    config: bytes, files: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights and constants of what files hold."""
    settings = json.loads(config)
    if _is_plain(settings, files):
        return {name: tensor.float() for name, tensor in files.items()}, {}
    from millrace.trainers.weights.conversion import from_files  # transformers takes seconds to load

    return from_files(settings, files)


def _is_plain(settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether files hold these tensors as the model has them. What a model lacks or does not know is said where it is
    built."""
    is_tied = bool(settings.get("tie_word_embeddings")) and _HEAD in tensors
    if settings.get("model_type") not in _PLAIN or "quantization_config" in settings or is_tied:
        return False
    return all(
        name in _PLAIN_NAMES or (name.startswith("model.layers.") and not name.endswith("inv_freq")) for name in tensors
    )


def _read_adapter(directory: Path, about: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> Adapter:
    settings = Lora(about["rank"], about["alpha"], tuple(about["targets"]), about["publish"])
    base = directory.parent / about["base"]
    if manifest.base_digest(base) != about["digest"]:
        raise CorruptCheckpoint(f"{base} is not the base that {directory} was trained on: restore it")
    return Adapter(settings, base, about["digest"], weights)


def _read_critic(directory: Path) -> State:
    about = json.loads((directory / CRITIC_TRAINING).read_bytes())
    moments = _by_slot(load_file(directory / CRITIC))
    weights, constants = moments.pop(_MASTER), moments.pop(_CONSTANT, {})
    assets = {"config.json": about["config"].encode()}
    return State(weights, assets, moments, int(about["step"]), int(about["seed"]), constants=constants)


def _by_slot(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    out: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        slot, name = key.split("/", 1)
        out.setdefault(slot, {})[name] = tensor
    return out


def adopt(directory: Path, *, seed: int = 0) -> State:
    """The state that starts from a Hugging Face model directory: its weights in fp32, no moments, step 0. Raises
    CheckpointError where its weights are not of the model of its config.json, or none that can train."""
    if not directory.is_dir():
        raise CheckpointError(f"there is no directory {directory}: name one in Hugging Face layout")
    shards = sorted(directory.glob("*.safetensors"))
    if (directory / ADAPTER_CONFIG).is_file():
        raise CheckpointError(f"{directory} is an adapter: merge it into its base, and start from that")
    if not shards or not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory} is no Hugging Face model directory: it needs config.json and *.safetensors")
    try:
        files = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    except SafetensorError as error:
        raise CorruptCheckpoint(f"{directory}: weights cannot be read ({error}); download them again") from error
    weights, constants = _convert((directory / "config.json").read_bytes(), files)
    skips = _OWN_FILES | {shard.name for shard in shards} | {f"{WEIGHTS}.index.json"}
    assets = {
        path.name: path.read_bytes()
        for path in sorted(directory.iterdir())
        if path.is_file() and path.name not in skips and path.suffix not in (".bin", ".pt", ".gguf", ".pth")
    }
    return State(weights, flatten_templates(directory, assets), seed=seed, source=directory, constants=constants)


def fingerprint(state: State) -> str:
    """sha256 hex over every byte of `state`: equal for equal states only."""
    files = {**_huggingface(state), **_training(state)}
    return Manifest({name: hashlib.sha256(_bytes(content)).hexdigest() for name, content in files.items()}).digest


def sweep(root: Path, older_than: float = 3600.0) -> list[Path]:
    """Removes drafts that were last written more than `older_than` seconds ago; returns them."""
    drafts = [path for path in root.glob(f"{durable.DRAFT}*") if time.time() - path.stat().st_mtime > older_than]
    for path in drafts:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return drafts


def _huggingface(state: State) -> dict[str, FileContent]:
    adapter = state.adapter
    if adapter is not None and adapter.lora.publish == "adapter":
        tensors = {_PEFT + name: tensor.contiguous() for name, tensor in adapter.weights.items()}
        config = _json(lora.peft_config(adapter.lora))
        return {**state.assets, ADAPTER_CONFIG: config, ADAPTER: tensors}
    dtype = dtype_of(state.assets)
    files = {name: tensor.to(dtype) for name, tensor in lora.merge(state).weights.items()}
    if state.constants or not _is_plain(json.loads(state.assets["config.json"]), files):
        from millrace.trainers.weights.conversion import to_files

        files = to_files(state.assets["config.json"], {**files, **state.constants})
    return {**state.assets, WEIGHTS: {name: tensor.contiguous() for name, tensor in files.items()}}


def _training(state: State, root: Path | None = None) -> dict[str, FileContent]:
    """root: where the version will lie; a base that lies there too is named by its name alone."""
    # One metadata key at most: safetensors writes several in no fixed order, and equal states must give equal bytes.
    training: dict[str, object] = {"step": state.step, "seed": state.seed}
    if state.adapter is not None:
        training["lora"] = _about(state.adapter, root)
    masters = state.adapter is None and dtype_of(state.assets) != torch.float32
    files: dict[str, FileContent] = {MOMENTS: _tensors(state, masters=masters), TRAINING: _json(training)}
    critic = state.critic
    if critic is not None:
        about = {"step": critic.step, "seed": critic.seed, "config": critic.assets["config.json"].decode()}
        files |= {CRITIC: _tensors(critic, masters=True), CRITIC_TRAINING: _json(about)}
    return files


def _tensors(state: State, *, masters: bool) -> dict[str, torch.Tensor]:
    slots = {**state.moments, **({_MASTER: state.weights, _CONSTANT: state.constants} if masters else {})}
    if state.adapter is not None:
        slots[_ADAPTER] = state.adapter.weights
    return {
        f"{slot}/{name}": tensor.contiguous() for slot, by_name in slots.items() for name, tensor in by_name.items()
    }


def _about(adapter: Adapter, root: Path | None) -> dict[str, object]:
    base = adapter.base.resolve()
    near = root is not None and base.parent == root.resolve()
    settings = adapter.lora
    about = {"rank": settings.rank, "alpha": settings.alpha, "targets": settings.targets, "publish": settings.publish}
    return {**about, "base": base.name if near else str(base), "digest": adapter.digest}


def _json(content: Mapping[str, object]) -> bytes:
    return (json.dumps(content) + "\n").encode()
