"""Encoded runs of a text, and what they decode to: base64, hexadecimal, percent, escapes, look-alike letters, and
characters that are not seen.

Invariants: substitutions ascend and do not overlap; none decodes to more bytes than it has; what decodes to no text is
no candidate; time is linear in the bytes, and a text without candidates costs one pass in C."""

from __future__ import annotations

import base64
import re
import string
import unicodedata
from collections.abc import Iterator
from functools import lru_cache

import orjson
from confusable_homoglyphs import confusables

from millrace.streams.refine.forms.view import Substitution

SHORTEST = 16
"""characters of a run of base64 or hexadecimal: 12 bytes or 8"""
_LETTERS = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"
_RUNS = bytes(97 if chr(n) in f"{_LETTERS}-_" else 32 for n in range(256))
_LONG = b"a" * SHORTEST
# Four characters of base64 spell three of printable ASCII only if their high bits say so; chance has it in one of 11.
_FIRST = _LETTERS[2:4] + _LETTERS[8:32]
_SECOND = "".join(letter for n, letter in enumerate(_LETTERS) if not n & 8)
_THIRD = "".join(letter for n, letter in enumerate(_LETTERS) if not n & 2)
_QUADS = re.compile(f"(?:[{_FIRST}][{_SECOND}][{_THIRD}][{_LETTERS}_-]){{2,}}".encode())
_LONG_RUN = 256
"""letters of a run beyond which patterns take longer than to decode it"""
_STRETCH = b"a" * 24
"""bytes of text in a row that are no chance in what is mostly none"""
_LINE = 60
"""letters of a line of base64 that goes on in the next one"""
_HEX_DIGITS = b"0123456789abcdefABCDEF"
_HEX = re.compile(rb"(?:[2-7][0-9a-fA-F]|0[9aAdD]){8,}")
_PERCENT = re.compile(rb"(?:%[0-7][0-9a-fA-F])+")
_ESCAPE = re.compile(rb"\\(?:[\"\\/bfnrt']|u[0-9a-fA-F]{4}|x[0-7][0-9a-fA-F])")
_ESCAPES = tuple(re.compile(mark) for mark in (rb"\\\"", rb"\\u00", rb"\\x[2-7]", rb"\\/"))
_PLAIN = bytes(range(32, 127)) + b"\t\r\n"
_SHAPE = bytes(97 if n in _PLAIN else 32 for n in range(256))
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_OTHER = re.compile(rb"[\x80-\xff]+")
_BESIDE = re.compile(rb"[A-Za-z0-9_@-]")
_STYLES = (b"\xef\xbc", b"\xef\xbd", b"\xf0\x9d")
"""how full-width and mathematical letters begin"""


def substitutions(text: bytes) -> list[Substitution]:
    """All that a text has."""
    candidates = list(_runs(text))
    if b"%" in text:
        candidates += (Substitution(m.start(), m.end(), _percent(m[0])) for m in _PERCENT.finditer(text))
    if b"\\" in text and any(mark.search(text) for mark in _ESCAPES):
        candidates += (Substitution(m.start(), m.end(), _escape(m[0])) for m in _ESCAPE.finditer(text))
    if not text.isascii():
        candidates += _folds(text)
    candidates.sort(key=lambda one: (one.lo, -one.hi))
    out: list[Substitution] = []
    for one in candidates:
        if not out or one.lo >= out[-1].hi:
            out.append(one)
    return out


def _runs(text: bytes) -> Iterator[Substitution]:
    shape = text.translate(_RUNS)
    at, before = shape.find(_LONG), None
    while at >= 0:
        end = shape.find(b" ", at)
        end = len(text) if end < 0 else end
        first = None
        for first in _of_run(text, at, end):
            if before is not None and first.lo == at and text[before : first.lo] in (b"\n", b"\r\n"):
                yield Substitution(before, first.lo, b"")
            before = None
            yield first
        # A line of a wrapped text goes on in the next one.
        before = end if first is not None and first.hi == end and end - at >= _LINE and not (end - at) % 4 else None
        at = shape.find(_LONG, end)


def _of_run(text: bytes, lo: int, hi: int) -> Iterator[Substitution]:
    run = text[lo:hi]
    if not run.translate(None, _HEX_DIGITS):
        if not len(run) % 2 and _is_text(value := bytes.fromhex(run.decode())):
            yield Substitution(lo, hi, value)
        return
    if len(run) > _LONG_RUN:
        yield from _of_base64(text, run, lo, _STRETCH)
        return
    pairs = list(_HEX.finditer(run))
    for match in pairs:
        yield Substitution(lo + match.start(), lo + match.end(), bytes.fromhex(match[0].decode()))
    if not pairs and _QUADS.search(run):
        yield from _of_base64(text, run, lo, _STRETCH[:9])


def _of_base64(text: bytes, run: bytes, lo: int, stretch: bytes) -> Iterator[Substitution]:
    """All of it where it decodes to text, else what text there is in the first alignment that gives some."""
    hi = lo + len(run)
    tail = text[hi : hi + 2]
    for first in range(4):
        value = _base64(run[first:])
        shape = value.translate(_SHAPE)
        at = shape.find(stretch)
        if _is_text(value):
            yield Substitution(lo + first, hi + len(tail) - len(tail.lstrip(b"=")), value)
            return
        last = at
        while at >= 0:
            end = shape.find(b" ", at)
            end = len(value) if end < 0 else end
            start, beyond = at // 3, -(-end // 3)
            piece = value[3 * start : 3 * beyond]
            yield Substitution(lo + first + 4 * start, min(hi, lo + first + 4 * beyond), piece)
            at = shape.find(stretch, end)
        if last >= 0:
            return


def _base64(run: bytes) -> bytes:
    """Three bytes of every four letters; what is over is left out."""
    run = run[:-1] if len(run) % 4 == 1 else run
    return base64.b64decode(run.translate(_URL_SAFE) + b"=" * (-len(run) % 4))


def _is_text(value: bytes) -> bool:
    """Whether bytes read as text: UTF-8, or nearly all of it printable."""
    odd = len(value.translate(None, _PLAIN))
    if not odd:
        return True
    try:
        value.decode()
    except UnicodeDecodeError:
        return odd * 20 <= len(value)
    return b"\x00" not in value


def _percent(run: bytes) -> bytes:
    return bytes.fromhex(run.replace(b"%", b"").decode())


def _escape(mark: bytes) -> bytes:
    if mark[1:2] == b"x":
        return bytes.fromhex(mark[2:].decode())
    if mark[1:2] == b"'":
        return b"'"
    if mark[1:3].lower() in (b"ud", b"uD"):
        return b"?"  # half of a pair
    text: str = orjson.loads(b'"%b"' % mark)
    return text.encode()


def _folds(text: bytes) -> Iterator[Substitution]:
    for run in _OTHER.finditer(text):
        lo, hi = run.span()
        is_beside = _BESIDE.match(text, max(0, lo - 1), lo) or _BESIDE.match(text, hi)
        if not is_beside and not run[0].startswith(_STYLES):
            continue
        at = lo
        for char in run[0].decode("utf-8", "replace"):
            size = len(char.encode())
            value = fold(char)
            if value is not None and at + size <= hi:
                yield Substitution(at, at + size, value.encode())
            at += size


_MARKS = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0")
"""letters and marks without a shape; variation selectors and what Unicode calls a format character come beside them"""


@lru_cache(maxsize=8192)
def fold(char: str) -> str | None:
    """What a character stands for: one ASCII character, "" for one that is not seen, None for itself.

    By NFKC (UAX 15), else by the confusables of Unicode (UTS 39)."""
    if char in _MARKS or unicodedata.category(char) == "Cf" or _is_selector(char):
        return ""
    normal = unicodedata.normalize("NFKC", char)
    if normal.isascii():
        return normal if len(normal) == 1 else None
    if len(normal) != 1:
        return None
    rivals = [entry["c"] for entry in confusables.confusables_data.get(normal, ())]
    letters = [rival for rival in rivals if len(rival) == 1 and rival.isascii()]
    alike = [letter for letter in letters if _case(letter) == _case(normal)]
    return next(iter(alike or letters), None)


def _is_selector(char: str) -> bool:
    return "\ufe00" <= char <= "\ufe0f" or "\U000e0000" <= char <= "\U000e01ef"


def _case(char: str) -> tuple[bool, bool]:
    return char.islower(), char.isupper()
