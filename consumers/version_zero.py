"""A policy begins: version 0, from a model directory or a version of another policy.

Invariants: version 0 is an event like every other, written in one transaction with its ledger entry (seqs 0..0, no
groups); it carries B, eta, S and the group size, and the hashes of model, tokenizer and chat template; a policy is
created once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.consumers import policy_names
from millrace.infra.config import Settings
from millrace.infra.engines.kinds import KINDS
from millrace.infra.errors import PolicyError
from millrace.infra.log.base import Bus, Outgoing
from millrace.infra.log.history import newest
from millrace.infra.log.history.ledger import chain_entry
from millrace.schemas import codec
from millrace.schemas.ids import now_micros
from millrace.schemas.records import LedgerEntry, WeightVersion

if TYPE_CHECKING:
    from millrace.trainers.weights.checkpoint import Checkpoint
    from millrace.trainers.weights.state import State

TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


def create(settings: Settings, model_dir: Path, bus: Bus, *, untie: bool = False) -> WeightVersion:
    """Write version 0 of `settings.policy` from a Hugging Face model directory (tokenizer included); gives its event.
    untie: with an output matrix of its own, where it shares the input embeddings.

    Raises PolicyError when the policy exists or the local engine cannot serve the model, CheckpointError when the
    directory is no model."""
    from millrace.trainers.weights import checkpoint, hugging_face

    state = checkpoint.adopt(model_dir, seed=settings.learner.seed)
    state = hugging_face.untie(state) if untie else state
    reason = unservable(settings, json.loads(state.assets["config.json"]))
    if reason is not None:
        raise PolicyError(f"{model_dir} {reason}")
    return begin(settings, state, bus)


def begin(settings: Settings, state: State, bus: Bus, parent: tuple[str, int] | None = None) -> WeightVersion:
    """Write version 0 of `settings.policy` from a state; gives its event. parent: the policy and version whose weights
    they are, for a branch. Raises PolicyError when the policy exists."""
    from millrace.trainers.weights import checkpoint, delta_files, manifest

    names = policy_names.topics(settings)
    weights, ledger_topic = names["weights"], names["ledger"]
    _refuse_existing(settings, bus)  # before the fence, which would cost running learners a regroup
    with bus.transactor(policy_names.transactional_id(settings)) as transactor:
        _refuse_existing(settings, bus)
        version_files = checkpoint.write(policy_names.weights_root(settings), 0, state)
        tokenizer_hash = manifest.subset_hash(manifest.Manifest(version_files.files), TOKENIZER)
        event = _event(settings, version_files, tokenizer_hash, delta_files.full_size(version_files.path), parent)
        transactor.begin()
        transactor.send(Outgoing(weights, event["policy"].encode(), codec.encode("WeightVersion", event)))
        transactor.send(Outgoing(ledger_topic, b"0", codec.encode("LedgerEntry", _entry(event))))
        transactor.commit({}, None)
    return event


def unservable(settings: Settings, config: Mapping[str, Any]) -> str | None:
    """Why the engine of this machine cannot serve versions of a model of this config.json, and what to do; None where
    it can, or where the engine is another's."""
    engine = settings.engine
    return KINDS[engine.kind].refusal(engine.device, config) if engine.local else None


def _refuse_existing(settings: Settings, bus: Bus) -> None:
    names = policy_names.topics(settings)
    existing = newest.head(bus, names["weights"], names["ledger"])
    if existing is not None:
        raise PolicyError(
            f"policy {settings.policy.name} exists already, at version {existing.version}: "
            "choose another [policy] name to start anew"
        )


def template_hash(directory: Path) -> str:
    """sha256 hex of the chat template of a model directory, of nothing when it has none."""
    template_file = directory / "chat_template.jinja"
    if template_file.is_file():
        return hashlib.sha256(template_file.read_bytes()).hexdigest()
    settings = directory / "tokenizer_config.json"
    template = json.loads(settings.read_bytes()).get("chat_template") if settings.is_file() else None
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True) if template else ""
    return hashlib.sha256(text.encode()).hexdigest()


def _event(
    settings: Settings, version_files: Checkpoint, tokenizer_hash: str, full_bytes: int, parent: tuple[str, int] | None
) -> WeightVersion:
    return {
        "policy": settings.policy.name,
        "version": 0,
        "parent": parent[1] if parent else None,
        "mode": "full",
        "uri": str(version_files.path),
        "digest": version_files.digest,
        "files": dict(version_files.files),
        "tokenizer_hash": tokenizer_hash,
        "template_hash": template_hash(version_files.path),
        "seq_lo": 0,
        "seq_hi": 0,
        "batch": settings.policy.batch,
        "eta": settings.policy.eta,
        "shards": settings.topics.shards,
        "group_size": settings.policy.group_size,
        "time": now_micros(),
        "delta": None,
        "delta_hash": None,
        "delta_bytes": None,
        "full_bytes": full_bytes,
        "broadcast": None,
        "parent_policy": parent[0] if parent else None,
        "selection": None,
        "selection_digest": None,
        "selection_places": None,
        "reward_source": None,
        "reward_rubric": None,
        "text_replies": None,
        "text_form": None,
    }


def _entry(event: WeightVersion) -> LedgerEntry:
    return chain_entry(
        {
            "policy": event["policy"],
            "version": 0,
            "seq_lo": 0,
            "seq_hi": 0,
            "groups": [],
            "ranks": [],
            "layout": "",
            "generation": 0,
            "leader": "",
            "unchanged": None,
            "masked_tokens": 0,
            "digest": event["digest"],
            "libraries": {},
            "cpu": "",
            "config_hash": "",
            "code_hash": "",
            "metrics": {},
            "eta": event["eta"] or 0,
            "prev_hash": b"",
            "hash": b"",
            "time": event["time"],
            "config": "",
            "models": {},
            "device": "",
            "threads": 0,
            "kernels": {},
        },
        b"",
    )
