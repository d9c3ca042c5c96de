"""One body through the detectors: what was found, the body without it, and what learning must not see.

Invariants: a detector that fails or times out fails closed; token ids are never edited - a call whose text or context
holds something that blocks keeps none of its token arrays, so that what is stored does not leak through them; findings
carry places and kinds, never values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from infra.errors import DetectorError
from schemas import arrays
from streams.refine.detectors.base import Detector, Hit
from streams.refine.leaves import Leaf, collect, replaced, spans_of

MOST_FINDINGS = 256
"""findings recorded an event; `counts` has them all"""

_TOKENS = {"prompt_ids": "int32", "output_ids": "int32", "output_logprobs": "float32", "output_versions": "int32"}


@dataclass(frozen=True, slots=True)
class Governed:
    """What became of a body."""

    body: Mapping[str, Any]
    redaction: str
    """none_needed, applied or failed"""
    counts: dict[str, int] = field(default_factory=dict)
    findings: list[dict[str, Any]] = field(default_factory=list)

    @property
    def changed(self) -> bool:
        return self.redaction == "applied"


def govern(kind: str, body: Mapping[str, Any], detectors: Sequence[Detector]) -> Governed:
    """Scan a body and take out what blocks."""
    buffer, leaves = collect(kind, body)
    if not buffer or not detectors:
        return Governed(body, "none_needed")
    try:
        hits = [hit for detector in detectors for hit in detector.scan(buffer)]
    except DetectorError:
        return Governed(blanked(kind, body, "unscanned"), "failed")
    if not hits:
        return Governed(body, "none_needed")
    counts = dict(Counter(hit.kind for hit in hits))
    findings = _findings(hits, leaves)
    blocking = sorted((hit.start, hit.end, hit.kind) for hit in hits if hit.blocks)
    if not blocking:
        return Governed(body, "none_needed", counts, findings)
    spans = _merged(blocking)
    texts = {}
    for n, leaf in enumerate(leaves):
        inside = [(lo, hi, kind_) for (a, b, kind_) in spans for lo, hi in spans_of(leaf, [(a, b)])]
        if inside:
            texts[n] = _without(leaf.text, inside)
    return Governed(replaced(kind, body, texts), "applied", counts, findings)


def withheld(body: Mapping[str, Any], reason: str) -> dict[str, Any]:
    """A model call that nothing can be learned from: no token arrays, and why."""
    empty = {name: arrays.empty(dtype) for name, dtype in _TOKENS.items()}
    return {**body, **empty, "trainable": False, "untrainable_reason": f"withheld:{reason}"}


def blanked(kind: str, body: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """A body without its text: what nobody scanned, or nobody may read."""
    _, leaves = collect(kind, body)
    return replaced(kind, body, dict.fromkeys(range(len(leaves)), f"[REDACTED:{mark}]"))


def _merged(spans: Sequence[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    out: list[tuple[int, int, str]] = []
    for start, end, kind in spans:
        if out and start < out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end), out[-1][2])
        else:
            out.append((start, end, kind))
    return out


def _without(text: bytes, spans: Sequence[tuple[int, int, str]]) -> str:
    out, at = [], 0
    for start, end, kind in spans:
        out += [text[at:start], f"[REDACTED:{kind}]".encode()]
        at = end
    return b"".join([*out, text[at:]]).decode("utf-8", "replace")


def _findings(hits: Sequence[Hit], leaves: Sequence[Leaf]) -> list[dict[str, Any]]:
    found = []
    for hit in sorted(hits):
        for leaf in leaves:
            for start, end in spans_of(leaf, [(hit.start, hit.end)]):
                found.append(
                    {"leaf": leaf.path, "start": start, "end": end, "kind": hit.kind, "detector": hit.detector}
                )
        if len(found) >= MOST_FINDINGS:
            return found[:MOST_FINDINGS]
    return found
