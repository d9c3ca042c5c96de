"""Kingfisher's rules for secrets (offline: its validators are never called).

Findings that it marks invisible are kept: halves of a composite secret are secrets."""

from __future__ import annotations

from importlib.metadata import version

from kingfisher_sdk import Rules, Scanner

from millrace.streams.refine.detectors.base import Detector, Hit


class Kingfisher(Detector):
    """All of its rules; every finding blocks. Compiling takes seconds once, then a cache serves
    (`rule_cache`)."""

    name = "kingfisher"

    def __init__(self) -> None:
        self._scanner = Scanner(Rules())
        self._version = f"kingfisher-{version('kingfisher-secret-scanner')}"

    def version(self) -> str:
        return self._version

    def scan(self, text: bytes) -> list[Hit]:
        hits = []
        for finding in self._scanner.scan(text):
            start, end = finding.location["start_offset"], finding.location["end_offset"]
            if start < end:
                kind = finding.rule_id.rpartition(".")[2].replace("-", "_")
                hits.append(Hit(start, end, kind, f"{self.name}:{finding.rule_id}", True))
        return sorted(hits)
