"""A lineage built again from the model calls that a sample names, and how the two differ.

The prefix rule: a call keeps the first `prefix_len` tokens of its lineage, drops what lies beyond, then adds its prompt
ids (nothing trains) and its output ids (sampled by the policy). Invariants: pure; arrays of one lineage have one
length T; log-probabilities count where the mask is 1; versions are -1 where nothing was sampled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millrace.consumers.audit.rows import Floats, Ints, Row, SealedSample, SealedTrace
from millrace.schemas.arrays import unpack

CLEARED = frozenset({"tenant_only", "aggregate"})
"""eligibilities that may train"""


@dataclass(frozen=True, slots=True)
class Built:
    """What the calls say: int32[T] tokens, float32[T] logprobs, int32[T] versions, and per token the response id that
    sampled it ("" for none). `error` says why it cannot be built."""

    tokens: Ints
    logprobs: Floats
    versions: Ints
    made_by: Sequence[str]
    error: str | None = None


def rebuild(trace: SealedTrace, calls: Sequence[Row | None]) -> Built:
    """Apply the calls of this lineage in its own order."""
    by_response = {
        call.body["response_id"]: call for call in calls if call is not None and call.body["lineage"] == trace.id
    }
    tokens, logprobs, versions = np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32)
    made_by: list[str] = []
    for response in trace.calls:
        call = by_response.get(response)
        if call is None:
            return Built(tokens, logprobs, versions, made_by, f"reply {response} is among none of its events")
        body = call.body
        keep = body["prefix_len"]
        if keep > len(tokens):
            return Built(tokens, logprobs, versions, made_by, f"reply {response} keeps {keep} of {len(tokens)} tokens")
        prompt, output = unpack(body["prompt_ids"]), unpack(body["output_ids"])
        blank = np.zeros(len(prompt), np.float32)
        tokens = np.concatenate([tokens[:keep], prompt, output])
        logprobs = np.concatenate([logprobs[:keep], blank, unpack(body["output_logprobs"])])
        versions = np.concatenate(
            [versions[:keep], np.full(len(prompt), -1, np.int32), unpack(body["output_versions"])]
        )
        made_by = [*made_by[:keep], *[""] * len(prompt), *[response] * len(output)]
    return Built(tokens, logprobs, versions, made_by)


def faults(sample: SealedSample) -> Iterator[tuple[str, list[Row]]]:
    """What is wrong with a sample's arrays and sums, each with the model calls that show it."""
    learned = _learned(sample)
    for trace in sample.traces:
        yield from _alone(trace)
        if trace.even:
            yield from _against(trace, sample.calls, learned)
    yield from _left_out(sample, learned)
    yield from _sums(sample)


def _learned(sample: SealedSample) -> frozenset[str]:
    """Response ids whose tokens may be learned from: trainable, cleared, of the sample's policy and not retried."""
    calls = [call for call in sample.calls if call is not None]
    retried = {call.body["supersedes"] for call in calls}
    return frozenset(
        call.body["response_id"]
        for call in calls
        if call.body["trainable"]
        and call["policy"] == sample.row["policy"]
        and call["governance"] is not None
        and call["governance"]["eligibility"] in CLEARED
        and call.body["response_id"] not in retried
    )


def _left_out(sample: SealedSample, learned: frozenset[str]) -> Iterator[tuple[str, list[Row]]]:
    """Replies that could train and are neither in a lineage nor excluded with a reason."""
    kept = {response for trace in sample.traces for response in trace.calls}
    excused = {entry.rpartition(":")[0] for entry in sample.row["excluded"]}
    if "*" in excused:
        return
    for call in sample.calls:
        if call is None or not len(unpack(call.body["output_ids"])):
            continue
        response = call.body["response_id"]
        if response in learned and response not in kept and response not in excused:
            yield f"reply {response} is in no lineage, and nothing says why", [call]


def _alone(trace: SealedTrace) -> Iterator[tuple[str, list[Row]]]:
    """What the arrays say without the calls."""
    if not trace.even:
        sizes = (len(trace.tokens), len(trace.mask), len(trace.logprobs), len(trace.versions))
        yield f"lineage {trace.id} has arrays of lengths {sizes}", []
        return
    if not np.isfinite(trace.logprobs[trace.mask]).all():
        yield f"lineage {trace.id} has a log-probability that is no number where it trains", []
    if (trace.versions[trace.mask] < 0).any():
        yield f"lineage {trace.id} trains on a token without a version", []


def _against(
    trace: SealedTrace, calls: Sequence[Row | None], learned: frozenset[str]
) -> Iterator[tuple[str, list[Row]]]:
    """What the calls say otherwise."""
    rows = [call for call in calls if call is not None and call.body["response_id"] in trace.calls]
    built = rebuild(trace, calls)
    if built.error:
        yield f"lineage {trace.id}: {built.error}", rows
        return
    if len(built.tokens) != len(trace.tokens):
        yield f"lineage {trace.id} has {len(trace.tokens)} tokens, its calls {len(built.tokens)}", rows
        return
    sampled = np.array([response in learned for response in built.made_by], bool)
    sampled &= (built.versions >= 0) & np.isfinite(built.logprobs)
    masked = trace.mask
    for what, differs in (
        ("token", built.tokens != trace.tokens),
        ("log-probability", masked & (built.logprobs != trace.logprobs)),
        ("version", masked & (built.versions != trace.versions)),
        ("mask", masked != sampled),
    ):
        at = _first(differs)
        if at is not None:
            yield f"lineage {trace.id} differs from its calls: the {what} at {at}", rows


def _sums(sample: SealedSample) -> Iterator[tuple[str, list[Row]]]:
    """What the trajectory says of its lineages."""
    row, versions = sample.row, sample.trained_versions
    length = sum(len(trace.tokens) for trace in sample.traces)
    if row["length"] != length:
        yield f"a trajectory says {row['length']} tokens, its lineages hold {length}", []
    if row["tokens"] != len(versions):
        yield f"a trajectory says {row['tokens']} trainable tokens, its lineages hold {len(versions)}", []
    if len(versions):
        span = (int(versions.min()), int(versions.max()))
        if (row["v_head"], row["v_tail"]) != span:
            yield (
                f"a trajectory says versions {row['v_head']} to {row['v_tail']}, its tokens {span[0]} to {span[1]}",
                [],
            )


def _first(differs: npt.NDArray[np.bool_]) -> int | None:
    """Index of the first difference."""
    return int(np.argmax(differs)) if differs.any() else None
