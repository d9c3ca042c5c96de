"""Model calls to token traces: exactly what the policy read and sampled, never text tokenized again.

Invariants: a call cuts its lineage to the kept prefix and appends its prompt and its output, nothing else; a token may
train only if the policy sampled it, its call may be learned from, it was not superseded, its version is known and its
log-probability finite; whatever is left out is named with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from millrace.schemas import arrays
from millrace.schemas.errors import CorruptRecord
from millrace.schemas.records import Array, Lineage, Place


class TracedCall(TypedDict):
    """What assembly needs of a model call."""

    response: str
    lineage: str
    keep: int
    """tokens of the lineage that its prompt goes on from"""
    prompt: Array
    output: Array
    logprobs: Array
    versions: Array
    supersedes: str | None
    why: str | None
    """why nothing of it may train"""
    place: Place


@dataclass(slots=True)
class _Piece:
    """Where in its lineage the trainable tokens of a call begin."""

    response: str
    start: int


_Values: TypeAlias = npt.NDArray[np.number]


@dataclass(slots=True)
class _Trace:
    tokens: list[_Values] = field(default_factory=list)
    mask: list[_Values] = field(default_factory=list)
    logprobs: list[_Values] = field(default_factory=list)
    versions: list[_Values] = field(default_factory=list)
    length: int = 0
    pieces: list[_Piece] = field(default_factory=list)
    cut_responses: list[str] = field(default_factory=list)
    """responses that a later call cut off whole"""
    calls: list[str] = field(default_factory=list)

    def cut(self, keep: int) -> None:
        for parts in (self.tokens, self.mask, self.logprobs, self.versions):
            rest = keep
            for n, part in enumerate(parts):
                if rest < len(part):
                    parts[n:] = [part[:rest]] if rest else []
                    break
                rest -= len(part)
        self.length = keep
        self.cut_responses += [piece.response for piece in self.pieces if piece.start >= keep]
        self.pieces = [piece for piece in self.pieces if piece.start < keep]

    def extend(self, tokens: _Values, mask: _Values, logprobs: _Values, versions: _Values) -> None:
        self.tokens.append(tokens)
        self.mask.append(mask)
        self.logprobs.append(logprobs)
        self.versions.append(versions)
        self.length += len(tokens)


@dataclass(frozen=True, slots=True)
class AssembledSample:
    """The lineages of one sample that hold a trainable token."""

    lineages: list[Lineage]
    exclusions: list[str]
    """`response:reason`"""
    v_head: int
    """oldest version among trainable tokens, -1 when there are none"""
    v_tail: int
    """newest one, -1 when there are none"""
    tokens: int
    """trainable tokens"""
    length: int
    """tokens in all lineages"""


def assemble(calls: Sequence[TracedCall]) -> AssembledSample:
    """The traces of one sample's calls, in the order of the log."""
    superseded_ids = {call["supersedes"] for call in calls if call["supersedes"]}
    traces: dict[str, _Trace] = {}
    exclusions: list[str] = []
    for call in calls:
        trace = traces.setdefault(call["lineage"], _Trace())
        reason = _add(trace, call, call["response"] in superseded_ids)
        if reason is not None:
            exclusions.append(f"{call['response']}:{reason}")
    lineages: list[Lineage] = []
    heads, tails, trainable, length = [], [], 0, 0
    for name, trace in traces.items():
        mask = _join(trace.mask, "uint8")
        count = int(mask.sum())
        exclusions += [f"{response}:cut" for response in trace.cut_responses]
        if not count:
            continue
        versions = _join(trace.versions, "int32")
        used = versions[mask == 1]
        heads.append(int(used.min()))
        tails.append(int(used.max()))
        trainable += count
        length += trace.length
        lineages.append(
            {
                "id": name,
                "tokens": arrays.pack(_join(trace.tokens, "int32")),
                "mask": arrays.pack(mask),
                "logprobs": arrays.pack(_join(trace.logprobs, "float32")),
                "versions": arrays.pack(versions),
                "calls": trace.calls,
            }
        )
    return AssembledSample(lineages, exclusions, min(heads, default=-1), max(tails, default=-1), trainable, length)


def _add(trace: _Trace, call: TracedCall, is_superseded: bool) -> str | None:
    """Append a call; the reason why nothing of it may train, else None."""
    try:
        prompt, output = _unpack(call["prompt"], "int32"), _unpack(call["output"], "int32")
        logprobs, versions = _unpack(call["logprobs"], "float32"), _unpack(call["versions"], "int32")
    except CorruptRecord:
        return "ragged"
    if not len(output) == len(logprobs) == len(versions):
        return "ragged"
    if call["keep"] > trace.length or call["keep"] < 0:
        return "missing_prefix"
    trace.cut(call["keep"])
    trace.calls.append(call["response"])
    zeros = len(prompt)
    trace.extend(prompt, np.zeros(zeros, np.uint8), np.zeros(zeros, np.float32), np.full(zeros, -1, np.int32))
    finite = np.isfinite(logprobs)
    mask = ((versions >= 0) & finite).astype(np.uint8)
    if is_superseded or call["why"]:
        mask[:] = 0
    if mask.any():
        trace.pieces.append(_Piece(call["response"], trace.length + int(mask.argmax())))
    trace.extend(output, mask, np.where(mask == 1, logprobs, np.float32(0)).astype(np.float32), versions)
    if mask.any():
        return None
    if call["why"]:
        return str(call["why"])
    if is_superseded:
        return "superseded"
    return "no_tokens" if not len(output) else "unknown_version" if (versions < 0).all() else "bad_logprobs"


def _unpack(array: Array, dtype: str) -> _Values:
    if array["dtype"] != dtype:
        raise CorruptRecord(f"an array of {array['dtype']} where {dtype} belongs")
    return arrays.unpack(array)


def _join(parts: Sequence[_Values], dtype: str) -> _Values:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)
