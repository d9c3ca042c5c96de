"""Whole records for `tests.support.history`, from the few things that differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from millrace.infra.log.base import Place
from millrace.schemas import codec
from millrace.schemas.arrays import pack, unpack

POLICY, SIZE = "pico", 2


def model_call(
    call: str,
    response: str,
    lineage: str,
    turn: int,
    kept: int,
    prompt: Sequence[int],
    output: Sequence[int],
    logprobs: Sequence[float],
    versions: Sequence[int],
) -> dict[str, Any]:
    """A ModelCall that may train."""
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 8, "seed": None, "stop": [], "n": 1}
    return {
        "call_id": call,
        "response_id": response,
        "choice": 0,
        "lineage": lineage,
        "opened": "first" if turn == 0 else None,
        "supersedes": None,
        "turn": turn,
        "prefix_len": kept,
        "prompt_ids": pack(np.array(prompt, np.int32)),
        "output_ids": pack(np.array(output, np.int32)),
        "output_logprobs": pack(np.array(logprobs, np.float32)),
        "output_versions": pack(np.array(versions, np.int32)),
        "request": b"{}",
        "response": b"{}",
        "sampling": sampling,
        "finish_reason": "stop",
        "stop_condition": None,
        "engine": "inprocess",
        "engine_version": "1",
        "engine_incarnation": "e1",
        "tokenizer_hash": "t",
        "template_hash": "c",
        "usage": {"prompt": len(prompt), "completion": len(output), "cached": 0},
        "cost": None,
        "latency_us": 1000,
        "ttft_us": 500,
        "trainable": True,
        "untrainable_reason": None,
        "identified_by": "key",
        "request_base": None,
        "request_kept": {},
        "earlier_engines": [],
    }


def lineage_of(calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sealed lineage of model calls, by the prefix rule."""
    tokens: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for call in calls:
        keep = call["prefix_len"]
        prompt, output = unpack(call["prompt_ids"]).tolist(), unpack(call["output_ids"]).tolist()
        sampled, made = unpack(call["output_logprobs"]).tolist(), unpack(call["output_versions"]).tolist()
        trains = int(call["trainable"])
        tokens = [*tokens[:keep], *prompt, *output]
        mask = [*mask[:keep], *[0] * len(prompt), *[trains] * len(output)]
        logprobs = [*logprobs[:keep], *[0.0] * len(prompt), *[value if trains else 0.0 for value in sampled]]
        versions = [*versions[:keep], *[-1] * len(prompt), *made]
    return {
        "id": calls[0]["lineage"],
        "tokens": pack(np.array(tokens, np.int32)),
        "mask": pack(np.array(mask, np.uint8)),
        "logprobs": pack(np.array(logprobs, np.float32)),
        "versions": pack(np.array(versions, np.int32)),
        "calls": [call["response_id"] for call in calls],
    }


def trajectory(events: Sequence[tuple[Mapping[str, Any], Place]], now: int) -> dict[str, Any]:
    """The sealed sample of an episode's events, with their places."""
    bodies = [(event, codec.decode_body(event["kind"], event["body"]), place) for event, place in events]
    first, started, _ = bodies[0]
    calls = [(body, place) for event, body, place in bodies if event["kind"] == "model_call"]
    reward = next(body for event, body, _ in bodies if event["kind"] == "reward")
    lineage = lineage_of([body for body, _ in calls])
    mask = unpack(lineage["mask"]).astype(bool)
    versions = unpack(lineage["versions"])[mask]
    sealed = {"reward_id": reward["reward_id"], "source": "verifier", "rubric_version": "1"}
    return {
        "id": first["trajectory"],
        "policy": POLICY,
        "tenant": first["tenant"],
        "group": first["group"],
        "ticket": started["ticket"],
        "sample": started["sample"],
        "attempt": first["attempt"],
        "task_id": started["task_id"],
        "split": first["split"],
        "status": "completed",
        "reward": reward["value"],
        "rewards": [{**sealed, "value": reward["value"], "failure": None}],
        "missing": [],
        "lineages": [lineage],
        "excluded": [],
        "v_head": int(versions.min()) if len(versions) else -1,
        "v_tail": int(versions.max()) if len(versions) else -1,
        "tokens": len(versions),
        "length": len(mask),
        "events": [place._asdict() for _, place in calls],
        "sealed_at": now,
    }


def completion(slot: int, samples: Sequence[Mapping[str, Any]], places: Sequence[Place], now: int) -> dict[str, Any]:
    """What seal says about a whole group."""
    heads = [sample["v_head"] for sample in samples if sample["v_head"] >= 0]
    tails = [sample["v_tail"] for sample in samples if sample["v_tail"] >= 0]
    ticket = samples[0]["ticket"]
    return {
        "kind": "unsolicited" if ticket is None else "complete",
        "policy": POLICY,
        "slot": slot,
        "time": now,
        "group": samples[0]["group"],
        "ticket": ticket,
        "size": SIZE,
        "samples": [sample["sample"] for sample in samples],
        "missing": [],
        "trajectories": [place._asdict() for place in places],
        "tokens": [sample["length"] for sample in samples],
        "rewards": [math.nan if sample["reward"] is None else sample["reward"] for sample in samples],
        "v_head": min(heads, default=-1),
        "v_tail": max(tails, default=-1),
        "reason": None,
    }


UNTRAINED = {
    "layout": "",
    "generation": 0,
    "leader": "",
    "libraries": {},
    "cpu": "",
    "config_hash": "",
    "code_hash": "",
}
"""what an entry says of training where nobody trained"""


def ledger_entry(
    version: int, low: int, batch: Sequence[Mapping[str, Any]], digest: str, eta: int, now: int
) -> dict[str, Any]:
    """A LedgerEntry that no chain holds yet; from version 3 on two learners share the work."""
    rewards = [reward for group in batch for reward in group["rewards"]]
    tokens = sum(count for group in batch for count in group["tokens"])
    names = ["learner-a", "learner-b"][: 1 + (version > 2)]
    totals = {"samples": len(rewards), "tokens": tokens, "groups": len(batch)}
    shares = [{name: _part(total, rank, len(names)) for name, total in totals.items()} for rank in range(len(names))]
    metrics = {"loss": 0.1, "tokens_total": float(tokens), "timings_step": 1.5, "timings_forward": 0.5}
    metrics |= {"reward_mean": sum(rewards) / len(rewards)} if rewards else {}
    named = ("seq", "ticket", "group", "trajectories")
    return {
        "policy": POLICY,
        "version": version,
        "seq_lo": low,
        "seq_hi": low + len(batch),
        "groups": [{name: group[name] for name in named} | {"lost": None} for group in batch],
        "ranks": [{"rank": rank, "member": name, **shares[rank]} for rank, name in enumerate(names)] if version else [],
        "layout": f"torch:d{len(names)}",
        "generation": 1 + (version > 2),
        "leader": "learner-a",
        "unchanged": None,
        "masked_tokens": 0,
        "digest": digest,
        "libraries": {"torch": "2"},
        "cpu": "x",
        "config_hash": "c",
        "code_hash": "d",
        "metrics": metrics if version else {},
        "eta": eta,
        "prev_hash": b"",
        "hash": b"",
        "time": now,
    } | ({} if version else UNTRAINED)


def _part(total: int, rank: int, ranks: int) -> int:
    """This rank's part of what is shared as evenly as can be."""
    return total // ranks + (rank < total % ranks)
