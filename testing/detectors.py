"""The contract of a detector of secrets.

    from millrace.testing import check_detector

    def test_my_detector() -> None:
        check_detector(MyDetector(), secrets=[("badge 12-3456 of mine", "12-3456")], clean=["12 eggs"])

Invariant: what is checked here holds for every sibling of `millrace.streams.refine.detectors`."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.streams.refine.detectors.base import Detector, Hit

ODD_TEXTS = ("", "\x00", "é🙂" * 1_000, "[" * 10_000, "0" * 50_000)
"""texts that hold nothing, however they look"""


def check_detector(detector: Detector, secrets: Sequence[tuple[str, str]], clean: Sequence[str] = ()) -> None:
    """Scan texts with a secret, (text, the secret in it), and texts without. Raises AssertionError where

    - a hit is empty, lies outside the UTF-8 bytes of its text or out of order, or holds the secret in its words;
    - the same text gives other hits when it is scanned again;
    - no blocking hit covers the secret, or one is in a clean text;
    - it has no version."""
    assert detector.version(), "the version is empty: two sets of rules could not be told apart"
    for text, secret in secrets:
        data, needle = text.encode(), secret.encode()
        at = data.index(needle)
        hits = _hits(detector, data)
        is_covered = any(hit.blocks and hit.start <= at and at + len(needle) <= hit.end for hit in hits)
        assert is_covered, f"no hit that blocks covers {secret!r} in {text!r}: there are {hits}"
        leaks = [hit for hit in hits if secret in hit.kind or secret in hit.detector]
        assert not leaks, f"{leaks} would write the secret into the log"
    for text in clean:
        false_alarms = [hit for hit in _hits(detector, text.encode()) if hit.blocks]
        assert not false_alarms, f"{text!r} holds no secret, and {false_alarms} would take something out of it"
    for text in ODD_TEXTS:
        _hits(detector, text.encode())


def _hits(detector: Detector, data: bytes) -> list[Hit]:
    excerpt = data[:100]
    hits = detector.scan(data)
    assert hits == sorted(hits), f"the hits in {excerpt!r} are not in order: {hits}"
    outside = [hit for hit in hits if not 0 <= hit.start < hit.end <= len(data)]
    assert not outside, f"of {len(data)} bytes, {excerpt!r}, these hits are empty or outside: {outside}"
    assert detector.scan(data) == hits, f"{excerpt!r} gave other hits when it was scanned again"
    return hits
