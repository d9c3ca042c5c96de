"""A policy and its ready groups, written straight into the log, so that learners need no agents, engines or stages.

Groups are the same for the same seq, wherever and whenever they are written: two runs differ by learners alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from millrace.consumers import policy_names, version_zero
from millrace.infra.config import Settings, load
from millrace.infra.log.base import Bus, Outgoing, Place
from millrace.infra.log.topics import partition_of
from millrace.schemas import codec
from millrace.schemas.arrays import pack
from millrace.schemas.records import WeightVersion

PROMPT = 8


def settings_for(folder: Path, bootstrap: str, namespace: str, **flags: Any) -> tuple[Settings, Path]:
    """Settings of a small deployment under `folder`, and the file that holds them."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "millrace.toml"
    file.write_text(
        f"""
namespace = "{namespace}"
home = "{folder / "home"}"
[kafka]
bootstrap = "{bootstrap}"
[topics]
shards = 4
[policy]
name = "pico"
batch = 4
group_size = 2
eta = 2
[learner]
lr = 5e-4
minibatches = 1
session_timeout_s = 12
collective_timeout_s = 60
"""
    )
    return load(file, flags), file


def start_policy(
    settings: Settings, bus: Bus, folder: Path, seed: int = 0, heads: int = 3, model: Path | None = None
) -> WeightVersion:
    """Create topics and version 0 from `model`, else from a tiny random one with so many attention heads."""
    from millrace.apps.demo import tiny
    from millrace.trainers.weights import checkpoint

    bus.ensure_topics(settings.layout.specs())
    if model is not None:
        return version_zero.create(settings, model, bus)
    model = folder / "model"
    state = tiny.random_state(seed)
    config = {**json.loads(state.assets["config.json"]), "num_attention_heads": heads, "num_key_value_heads": heads}
    assets = {**state.assets, "config.json": json.dumps(config).encode()}
    checkpoint.export(model, state if heads == 3 else replace(state, assets=assets))
    return version_zero.create(settings, model, bus)


def trajectory(policy_name: str, seq: int, sample: int, *, size: int, version: int | None = None) -> dict[str, Any]:
    """A sealed sample of group `seq`: a prompt and a reply of 3 to 8 tokens, a reward of 0 or 1."""
    draw = np.random.default_rng([seq, sample])
    new = int(draw.integers(3, 9))
    tokens = draw.integers(3, 23, PROMPT + new).astype(np.int32)
    mask = np.array([0] * PROMPT + [1] * new, np.uint8)
    made = seq // 4 if version is None else version
    return {
        "id": f"trajectory-{seq}-{sample}",
        "policy": policy_name,
        "tenant": "local",
        "group": f"group-{seq}",
        "ticket": seq,
        "sample": sample,
        "attempt": f"attempt-{seq}-{sample}",
        "task_id": f"task-{seq}",
        "split": "train",
        "status": "completed",
        "reward": float((seq + sample) % size == 0),
        "rewards": [],
        "missing": [],
        "lineages": [
            {
                "id": f"lineage-{seq}-{sample}",
                "tokens": pack(tokens),
                "mask": pack(mask),
                "logprobs": pack(np.where(mask, -3.4, 0.0).astype(np.float32)),
                "versions": pack(np.where(mask, made, -1).astype(np.int32)),
                "calls": [f"response-{seq}-{sample}"],
            }
        ],
        "excluded": [],
        "v_head": made,
        "v_tail": made,
        "tokens": new,
        "length": PROMPT + new,
        "events": [],
        "sealed_at": seq,
    }


def resolution(
    settings: Settings, seq: int, places: Iterable[Place], tokens: list[int], version: int
) -> dict[str, Any]:
    """The ready resolution of group `seq`."""
    eta = settings.policy.eta
    return {
        "kind": "ready",
        "policy": settings.policy.name,
        "ticket": seq,
        "seq": seq,
        "group": f"group-{seq}",
        "prompt_id": f"task-{seq}",
        "solicited": True,
        "size": settings.policy.group_size,
        "trajectories": [place._asdict() for place in places],
        "tokens": tokens,
        "rewards": [0.0] * len(tokens),
        "v_head": version,
        "v_tail": version,
        "min_version": version,
        "deadline": version + eta,
        "reason": None,
        "setting": None,
        "time": seq,
    }


def completion(settings: Settings, ready: Mapping[str, Any]) -> dict[str, Any]:
    """Seal's word about the same group."""
    return {
        "kind": "complete",
        "policy": ready["policy"],
        "slot": 0,
        "time": ready["time"],
        "group": ready["group"],
        "ticket": ready["ticket"],
        "size": ready["size"],
        "samples": list(range(len(ready["trajectories"]))),
        "missing": [],
        "trajectories": ready["trajectories"],
        "tokens": ready["tokens"],
        "rewards": ready["rewards"],
        "v_head": ready["v_head"],
        "v_tail": ready["v_tail"],
        "reason": None,
    }


def feed(
    bus: Bus,
    settings: Settings,
    seqs: range,
    *,
    version: int | None = None,
    gone: Iterable[int] = (),
    change: Callable[[dict[str, Any]], None] = lambda _: None,
) -> None:
    """Write groups `seqs`, in one transaction each for samples and completion and one for the resolutions of all.

    `version` stamps their tokens (default: the version that trains them when B is 4). Samples of the seqs in `gone`
    are in an aborted transaction: their places hold nothing. `change` may alter each sample before it is written."""
    names = policy_names.topics(settings)
    size = settings.policy.group_size
    shards = settings.topics.shards
    ready = []
    with bus.transactor(f"{settings.namespace}.feed") as transactor:
        for seq in seqs:
            made = seq // 4 if version is None else version
            samples = [
                trajectory(settings.policy.name, seq, sample, size=size, version=version) for sample in range(size)
            ]
            for sample in samples:
                change(sample)
            partition = partition_of(f"group-{seq}", shards)
            transactor.begin()
            sent = [
                transactor.send(
                    Outgoing(
                        names["trajectories"],
                        f"group-{seq}".encode(),
                        codec.encode("Trajectory", sample),
                        partition=partition,
                    )
                )
                for sample in samples
            ]
            transactor.flush()
            row = resolution(settings, seq, [one.place for one in sent], [s["length"] for s in samples], made)
            ready.append(row)
            if seq in gone:
                transactor.abort()
                continue
            value = codec.encode("Completion", completion(settings, row))
            transactor.send(Outgoing(names["completions"], f"group-{seq}".encode(), value))
            transactor.commit({}, None)
        transactor.begin()
        for row in ready:
            transactor.send(Outgoing(names["resolutions"], row["group"].encode(), codec.encode("Resolution", row)))
        transactor.commit({}, None)
