"""Our own rules on Vectorscan (the `hyperscan` package, block mode): one pass for all triggers, verified one by one.

Traps kept out: streaming mode crashes with temporary callbacks, so only block mode is used; every end of a match is
reported, so triggers are short and `DetectorRule.full` measures; match-dense text costs a Python call a hit, so
verified hits a rule are capped, and beyond the cap a blocking rule blocks unverified; beyond `bounds.HITS` in all, what
is returned is one more than that, and nobody may pass such a text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.metadata import version
from string import ascii_letters, digits

import hyperscan

from millrace.schemas import bounds
from millrace.streams.refine.detectors.base import Detector, Hit
from millrace.streams.refine.detectors.rules import RULES, RUN, DetectorRule
from millrace.streams.refine.detectors.structure import FINDERS, MOST, Finder

CAP = 200
"""verified hits a rule and buffer"""

_SHAPE = bytes(97 if chr(n) in f"{ascii_letters}{digits}/+" else 32 for n in range(256))
_RUN = b"a" * 40


class Vectorscan(Detector):
    """Rules compiled into one database."""

    name = "vectorscan"

    def __init__(self, rules: tuple[DetectorRule, ...] = RULES) -> None:
        self._rules = rules
        self._of_runs = [number for number, rule in enumerate(rules) if rule.trigger == RUN.encode()]
        self._database = hyperscan.Database(mode=hyperscan.HS_MODE_BLOCK)
        count = len(rules) + len(FINDERS)
        caseless = hyperscan.HS_FLAG_SOM_LEFTMOST | hyperscan.HS_FLAG_CASELESS
        self._database.compile(
            expressions=[rule.trigger for rule in rules] + [finder.trigger for finder in FINDERS],
            ids=list(range(count)),
            elements=count,
            flags=[_flags(rule) for rule in rules] + [caseless] * len(FINDERS),
        )
        text = repr(
            [
                (r.kind, r.trigger, r.form.pattern, r.blocks, r.caseless, r.near and r.near.pattern, r.alone)
                for r in rules
            ]
            + [f.trigger for f in FINDERS]
        ).encode()
        self._version = f"vectorscan-{version('hyperscan')}-{hashlib.sha256(text).hexdigest()[:12]}"

    def version(self) -> str:
        return self._version

    def scan(self, text: bytes) -> list[Hit]:
        starts: set[tuple[int, int]] = set()
        self._database.scan(
            text, match_event_handler=lambda rule, start, end, flags, context: starts.add((rule, start))
        )
        if self._of_runs and (self._of_runs[0], 0) in starts:
            starts.update((number, start) for start in _runs(text) for number in self._of_runs)
        hits: list[Hit] = []
        progress: dict[int, tuple[int, int]] = {}
        labels = _Labels(text)
        for number, start in sorted(starts):
            if number >= len(self._rules):
                labels.add(FINDERS[number - len(self._rules)], start)
                continue
            rule = self._rules[number]
            count, past = progress.get(number, (0, 0))
            if start < past:
                continue
            match = rule.find(text, start)
            if match is None:
                continue
            begin, end, value, blocks = match
            dense = count >= CAP
            if dense and not blocks:
                continue
            if not dense and rule.verify is not None and not rule.verify(value):
                continue
            progress[number] = (count + 1, end)
            name = f"{self.name}:dense" if dense else self.name
            hits.append(Hit(begin, end, rule.kind, name, blocks))
            if len(hits) > bounds.HITS:
                break
        return sorted(hits + labels.hits) if labels.hits else sorted(hits)


class _Labels:
    """What structure says of a text: no value twice."""

    def __init__(self, text: bytes) -> None:
        self.hits: list[Hit] = []
        self._text = text
        self._values: set[tuple[int, int]] = set()

    def add(self, finder: Finder, start: int) -> None:
        for lo, hi, kind in finder.find(self._text, start):
            if len(self.hits) >= MOST:
                return
            if (lo, hi) not in self._values:
                self._values.add((lo, hi))
                self.hits.append(Hit(lo, hi, kind, "structure", False))


def _flags(rule: DetectorRule) -> int:
    if rule.trigger == RUN.encode():
        return int(hyperscan.HS_FLAG_SINGLEMATCH)
    return int(hyperscan.HS_FLAG_SOM_LEFTMOST | (hyperscan.HS_FLAG_CASELESS if rule.caseless else 0))


def _runs(text: bytes) -> Iterator[int]:
    """Where the runs of 40 and more letters of base64 begin."""
    shape = text.translate(_SHAPE)
    at = shape.find(_RUN)
    while at >= 0:
        yield at
        end = shape.find(b" ", at)
        at = shape.find(_RUN, end) if end >= 0 else -1
