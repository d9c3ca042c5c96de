"""One event through the detectors: what was found, the event without it, and what learning must not see.

Invariants: a detector that fails or times out, and an event beyond a bound, fail closed: no text passes that nobody
read; token ids are never edited - a call whose text or context holds something that blocks keeps none of its token
arrays, nor the log-probabilities that spell it, so that what is stored does not leak through them; findings carry
places and kinds, never values; time is linear in the bytes of the event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import orjson

from millrace.infra.errors import DetectorError
from millrace.schemas import arrays, bounds
from millrace.schemas.records import Body, Event, Finding, ModelCall, RedactionStatus
from millrace.streams.refine import personal, strings
from millrace.streams.refine.detectors.base import Detector, Hit
from millrace.streams.refine.forms.reading import VERSION, Reading
from millrace.streams.refine.leaves import Buffer, LeafKind, TooMuch
from millrace.streams.refine.names import Replacements, is_plain
from millrace.streams.refine.strings import Path, String
from millrace.streams.refine.subjects.registry import Registry
from millrace.streams.refine.sweep import FoundSpan, cuts, places

MOST_FINDINGS = 256
"""findings recorded an event; `counts` has them all"""
SUBJECT = "subject"
"""the kind of what a registry knows"""
MOST_CLEAN = 65_536
"""names without any finding that are remembered"""


class UnreadNames(Exception):
    """The detectors failed on the names of an event alone, so that not even an event without its text can be kept."""


class EventParts:
    """An event in the parts that it is scanned in. The path of a string begins with the part that it is of."""

    def __init__(self, event: Event, body: Body | None, headers: Mapping[str, str]) -> None:
        self.event, self.body, self.headers = event, body, headers

    def strings(self, skips: Container[str]) -> list[String]:
        """What is to be scanned: all but the names that are `skips`."""
        return strings.strings_of(self.event, self.body, self.headers, skips)

    def with_values(self, values: Mapping[Path, str | bytes]) -> tuple[Event, Body | None, Mapping[str, str]]:
        """(envelope, body, headers) that read `values`; a part without any is the one that came."""
        parts: dict[object, dict[Path, str | bytes]] = {"event": {}, "body": {}, "headers": {}}
        for (part, *path), value in values.items():
            parts[part][tuple(path)] = value
        body = self.body
        return (
            cast(Event, strings.with_values(self.event, parts["event"])) if parts["event"] else self.event,
            cast(Body, strings.with_values(body, parts["body"])) if body is not None and parts["body"] else body,
            strings.with_values(self.headers, parts["headers"]) if parts["headers"] else self.headers,
        )


@dataclass(frozen=True, slots=True)
class GovernedEvent:
    """What became of an event."""

    event: Event
    """its envelope, without what its names held"""
    body: Body | None
    headers: Mapping[str, str]
    redaction: RedactionStatus
    """none_needed, applied or failed"""
    failure: str | None = None
    """why its text was not read"""
    edits_text: bool = False
    """whether more than names was taken out"""
    counts: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    subjects: tuple[str, ...] = ()
    """of the tenant's registry, those that it mentions"""
    registry: str = ""
    """which state of the registry said so"""
    personal: frozenset[str] = frozenset()
    """fields that schemas in it mark as personal"""


class Redactor:
    """Detectors, and what they found clean before: names repeat from event to event."""

    def __init__(self, detectors: Sequence[Detector], names: Replacements) -> None:
        self._detectors = detectors
        self._names = names
        self._clean: set[str] = set()
        self.version = "+".join([*(detector.version() for detector in detectors), VERSION] if detectors else ["none"])

    def govern(
        self,
        parts: EventParts,
        also: Collection[str] = (),
        registry: Registry | None = None,
        fields: Collection[str] = (),
    ) -> GovernedEvent:
        """Scan an event and take out what blocks, hits of the kinds in `also`, and what the registry of the tenant
        knows. `fields` are personal by what came before. Raises UnreadNames."""
        if not self._detectors and registry is None:
            return GovernedEvent(parts.event, parts.body, parts.headers, "none_needed")
        clean = self._clean if registry is None else registry.clean_names
        try:
            return self._govern(parts, parts.strings(clean), also, registry, fields)
        except DetectorError:
            failure = "detectors_failed"
        except TooMuch as error:
            failure = error.code
        try:
            names = [string for string in parts.strings(clean) if not string.text]
            names_alone = self._govern(parts, names, also, registry, ())
        except (DetectorError, TooMuch):
            raise UnreadNames from None
        body = None if names_alone.body is None else blank(parts.event["kind"], names_alone.body, failure)
        return replace(names_alone, body=body, redaction="failed", failure=failure, edits_text=True)

    def names(self, tenant: str, originals: Sequence[str], registry: Registry | None = None) -> list[str]:
        """Names of something that is no event, each replaced if it holds what blocks. Without an answer of the
        detectors all are replaced."""
        if not self._detectors and registry is None:
            return list(originals)
        clean = self._clean if registry is None else registry.clean_names
        buffer = Buffer()
        try:
            unread = ((number, name) for number, name in enumerate(originals) if name not in clean)
            buffer.add(String((number,), name, False) for number, name in unread if not is_plain(name))
            hits, _ = self._scan(buffer, registry)
            spans_by_leaf = cuts((hit for hit in hits if hit.blocks), buffer.leaves)
        except (DetectorError, TooMuch):
            return [self._names.of(tenant, name) for name in originals]
        secret_names = {buffer.sources[buffer.leaves[number].source].value for number in spans_by_leaf}
        return [self._names.of(tenant, name) if name in secret_names else name for name in originals]

    def _scan(self, buffer: Buffer, registry: Registry | None) -> tuple[list[Hit], tuple[str, ...]]:
        """The hits in a buffer, and the subjects that it mentions."""
        if not buffer.text:
            return [], ()
        reading = Reading(buffer)
        hits = [hit for detector in self._detectors for hit in detector.scan(reading.text)]
        mentions = [] if registry is None else registry.mentions(reading.text)
        hits += (Hit(mention.start, mention.end, SUBJECT, "registry", True) for mention in mentions)
        if len(hits) > bounds.HITS:
            raise TooMuch("too_many_hits")
        return reading.hits(hits), tuple(sorted({name for mention in mentions for name in mention.subjects}))

    def _govern(
        self,
        parts: EventParts,
        selection: Iterable[String],
        also: Collection[str],
        registry: Registry | None,
        fields: Collection[str],
    ) -> GovernedEvent:
        buffer = Buffer()
        buffer.add(string for string in selection if string.text or not is_plain(str(string.value)))
        hits, subjects = self._scan(buffer, registry)
        marks = personal.fields_of(buffer)
        if marks or fields:
            hits = sorted([*hits, *personal.hits(buffer, marks.union(fields))])
        self._remember(buffer, hits, self._clean if registry is None else registry.clean_names)
        outcome = GovernedEvent(
            parts.event,
            parts.body,
            parts.headers,
            "none_needed",
            subjects=subjects,
            personal=marks,
            registry="" if registry is None else registry.version,
        )
        if not hits:
            return outcome
        spans_by_leaf = cuts((hit for hit in hits if hit.blocks or hit.kind in also), buffer.leaves)
        counts, findings = dict(Counter(hit.kind for hit in hits)), _findings(hits, buffer, spans_by_leaf)
        outcome = replace(outcome, counts=counts, findings=findings)
        if not spans_by_leaf:
            return outcome
        values, edits_text = self._values(parts.event["tenant"], buffer, spans_by_leaf)
        event, body, headers = parts.with_values(values)
        return replace(outcome, event=event, body=body, headers=headers, redaction="applied", edits_text=edits_text)

    def _remember(self, buffer: Buffer, hits: Sequence[Hit], clean: set[str]) -> None:
        if len(clean) > MOST_CLEAN:
            clean.clear()
        spans_by_leaf = cuts(hits, buffer.leaves) if hits else {}
        for number, leaf in enumerate(buffer.leaves):
            if leaf.kind is LeafKind.NAME and number not in spans_by_leaf:
                clean.add(str(buffer.sources[leaf.source].value))

    def _values(
        self, tenant: str, buffer: Buffer, spans_by_leaf: Mapping[int, Sequence[FoundSpan]]
    ) -> tuple[dict[Path, str | bytes], bool]:
        """What the strings read once spans are cut out of leaves, and whether any of them is text."""
        edits: dict[int, list[tuple[int, int, bytes]]] = {}
        keys = 0
        for number, spans in spans_by_leaf.items():
            leaf = buffer.leaves[number]
            text = buffer.text_of(leaf)
            match leaf.kind:
                case LeafKind.NAME:
                    replacement = self._names.of(tenant, text.decode()).encode()
                case LeafKind.TOKENS:
                    continue
                case LeafKind.TEXT:
                    replacement = _without(text, spans).encode()
                case LeafKind.KEY:
                    # Two keys of one map must not become the same.
                    keys += 1
                    replacement = orjson.dumps(_without(text, spans) + (f" {keys}" if keys > 1 else ""))
                case _:
                    replacement = orjson.dumps(_without(text, spans))
            edits.setdefault(leaf.source, []).append((leaf.lo, leaf.hi, replacement))
        edits_text = any(buffer.leaves[number].kind is not LeafKind.NAME for number in spans_by_leaf)
        if edits_text:
            for source, ranges in buffer.token_lists.items():
                edits[source] = [(lo, hi, b"null") for lo, hi in ranges] + edits.get(source, [])
        return {
            buffer.sources[source].path: _splice(buffer.sources[source].value, sorted(pieces))
            for source, pieces in edits.items()
        }, edits_text


def withheld(body: ModelCall, reason: str) -> ModelCall:
    """A model call that nothing can be learned from: no token arrays, and why."""
    return {
        **body,
        "prompt_ids": arrays.empty_array("int32"),
        "output_ids": arrays.empty_array("int32"),
        "output_logprobs": arrays.empty_array("float32"),
        "output_versions": arrays.empty_array("int32"),
        "trainable": False,
        "untrainable_reason": f"withheld:{reason}",
    }


def blank(kind: str, body: Body, mark: str) -> Body:
    """A body without its text: what nobody scanned, or nobody may read."""
    put = f"[REDACTED:{mark}]"
    texts = {path: value for path, value, _ in strings.texts_of(kind, body) if value}
    # What is bytes held JSON, and stays readable as such.
    values = {path: orjson.dumps(put) if isinstance(value, bytes) else put for path, value in texts.items()}
    return cast(Body, strings.with_values(body, values))


def _without(text: bytes, spans: Sequence[FoundSpan]) -> str:
    out, at = [], 0
    for start, end, kind in spans:
        if end <= at:
            continue
        out += [text[at : max(at, start)], f"[REDACTED:{kind}]".encode()]
        at = end
    return b"".join([*out, text[at:]]).decode("utf-8", "replace")


def _splice(value: str | bytes, pieces: Sequence[tuple[int, int, bytes]]) -> str | bytes:
    """A string with bytes [lo, hi) replaced; pieces are ascending, and one that lies in the one before is dropped."""
    data = value.encode() if isinstance(value, str) else value
    out, at = [], 0
    for lo, hi, replacement in pieces:
        if lo >= at:
            out += [data[at:lo], replacement]
            at = hi
    result = b"".join([*out, data[at:]])
    return result.decode() if isinstance(value, str) else result


def _findings(hits: Sequence[Hit], buffer: Buffer, spans_by_leaf: Mapping[int, Sequence[FoundSpan]]) -> list[Finding]:
    """The first MOST_FINDINGS places of hits in leaves."""
    starts = [leaf.start for leaf in buffer.leaves]
    rows = []
    for hit in hits:
        rows += [(hit, number, start, end) for number, start, end in places(hit, starts, buffer.leaves)]
        if len(rows) >= MOST_FINDINGS:
            break
    rows = rows[:MOST_FINDINGS]
    paths = _paths(buffer, {number for _, number, _, _ in rows}, spans_by_leaf)
    return [
        {"leaf": paths[number], "start": start, "end": end, "kind": hit.kind, "detector": hit.detector}
        for hit, number, start, end in rows
    ]


def _paths(
    buffer: Buffer, leaf_numbers: Collection[int], spans_by_leaf: Mapping[int, Sequence[FoundSpan]]
) -> dict[int, str]:
    """Leaf number -> where it stands in the event."""
    by_source: dict[int, dict[int, int]] = {}
    for number in leaf_numbers:
        leaf = buffer.leaves[number]
        by_source.setdefault(leaf.source, {})[leaf.lo] = number
    secret_keys: dict[int, set[int]] = {}
    for number in spans_by_leaf:
        leaf = buffer.leaves[number]
        if leaf.kind is LeafKind.KEY:
            secret_keys.setdefault(leaf.source, set()).add(leaf.lo)
    out: dict[int, str] = {}
    for source, numbers in by_source.items():
        part, *path = buffer.sources[source].path
        root = strings.path_of(tuple(path)) if part == "body" else strings.path_of((part, *path))
        inside = buffer.documents.get(source)
        if inside is None:
            out |= dict.fromkeys(numbers.values(), root)
            continue
        paths = inside.paths(root, frozenset(numbers), frozenset(secret_keys.get(source, ())))
        out |= {number: paths.get(lo, root) for lo, number in numbers.items()}
    return out
