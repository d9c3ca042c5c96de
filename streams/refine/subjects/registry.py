"""A tenant's subjects, found in text by their own identifiers: names, addresses, numbers.

Text and identifiers are compared in lower case and in the compatible form of Unicode (NFKC), an identifier that is a
number without the spaces and signs between its digits. An identifier stands alone: no letter or digit touches it,
except in scripts that write no spaces.

Invariants: every place where an identifier stands alone is found, whatever overlaps it; spans are bytes of the text as
it came; time is linear in the text and in the places."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ahocorasick_rs import BytesAhoCorasick

SHORTEST = 3
"""characters of an identifier"""
_DIGITS = 7
"""digits of an identifier that is compared as a number"""
_NUMBER = re.compile(r"\+?[0-9(][0-9 ()./-]*[0-9]")
_NUMBERS = re.compile(rb"[0-9](?:[ ()./-]{0,3}[0-9]){6,}+")
_GROUP = re.compile(rb"[0-9]+")
_NOT_DIGITS = bytes(set(range(256)) - set(b"0123456789"))
_FOREIGN = re.compile(rb"[\x00-\x7f]?[\x80-\xff]+")
_DENSE = "\u2e80"
"""from here on scripts write no spaces between words, mostly"""


class Mention(NamedTuple):
    """Bytes [start, end) of a text, and the subjects that they may mean."""

    start: int
    end: int
    subjects: frozenset[str]


class Registry:
    """Subjects by their identifiers. `version` tells two registries apart, without a word of what is in them."""

    def __init__(self, subjects: Mapping[str, Iterable[str]], version: str) -> None:
        """Identifiers shorter than SHORTEST are left out: they are everywhere."""
        owners: dict[bytes, set[str]] = {}
        numbers: dict[bytes, set[str]] = {}
        for subject, identifiers in subjects.items():
            for identifier in identifiers:
                text = _normal(identifier.strip())
                digits = text.encode().translate(None, _NOT_DIGITS)
                if _NUMBER.fullmatch(text) and len(digits) >= _DIGITS:
                    numbers.setdefault(digits, set()).add(subject)
                elif len(text) >= SHORTEST or text[:1] >= _DENSE:
                    owners.setdefault(text.encode(), set()).add(subject)
        self.version = version
        self.clean_names: set[str] = set()
        """names in which nothing was found; see `redact`"""
        self._owners = [frozenset(names) for names in owners.values()]
        self._edges = [(_is_word(text.decode()[:1]), _is_word(text.decode()[-1:])) for text in owners]
        self._automaton = BytesAhoCorasick(list(owners)) if owners else None
        self._numbers = {digits: frozenset(names) for digits, names in numbers.items()}
        self._most_digits = max(map(len, numbers), default=0)

    def mentions(self, text: bytes) -> list[Mention]:
        """Every place of an identifier, in order of start."""
        out = list(self._of_numbers(text))
        if self._automaton is not None:
            normal = _NormalText(text)
            for number, start, end in self._automaton.find_matches_as_indexes(normal.text, overlapping=True):
                head, tail = self._edges[number]
                if not (head and normal.is_word_before(start)) and not (tail and normal.is_word_at(end)):
                    out.append(Mention(*normal.span(start, end), self._owners[number]))
        return sorted(out, key=lambda mention: mention[:2])

    def _of_numbers(self, text: bytes) -> Iterator[Mention]:
        if not self._numbers:
            return
        for match in _NUMBERS.finditer(text):
            groups = [group.span() for group in _GROUP.finditer(text, *match.span())]
            first = 0
            while first < len(groups):
                first = yield from self._of_groups(text, groups, first)

    def _of_groups(self, text: bytes, groups: Sequence[tuple[int, int]], first: int) -> Generator[Mention, None, int]:
        """The longest number that begins with a group of digits, and the group behind it: what stands beside a number
        may be another one."""
        digits, longest = b"", first
        for number in range(first, len(groups)):
            digits += text[slice(*groups[number])]
            if len(digits) > self._most_digits:
                break
            if digits in self._numbers:
                longest = number + 1
                subjects = self._numbers[digits]
        if longest == first:
            return first + 1
        yield Mention(groups[first][0], groups[longest - 1][1], subjects)
        return longest


class _NormalText:
    """A text as it is compared, and where its bytes come from."""

    def __init__(self, text: bytes) -> None:
        self._pieces: list[tuple[int, int, int, int]] = []
        """(begin, end) in the normal text and (lo, hi) in the text, of pieces that are not as long as they were"""
        if text.isascii():
            self.text = text.lower()
            return
        parts: list[bytes] = []
        at = size = 0
        for match in _FOREIGN.finditer(text):
            lo, hi = match.span()
            parts.append(text[at:lo].lower())
            size += lo - at
            for piece, width in _pieces(match[0]):
                if len(piece) != width or piece != text[lo : lo + width]:
                    self._pieces.append((size, size + len(piece), lo, lo + width))
                parts.append(piece)
                size += len(piece)
                lo += width
            at = hi
        parts.append(text[at:].lower())
        self.text = b"".join(parts)

    def span(self, start: int, end: int) -> tuple[int, int]:
        """Where bytes [start, end) of the normal text come from."""
        return self._origin(start)[0], self._origin(end - 1)[1]

    def _origin(self, at: int) -> tuple[int, int]:
        """The bytes [lo, hi) that a byte of the normal text comes from."""
        low, high = 0, len(self._pieces)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self._pieces[middle][0] <= at else (low, middle)
        if not low:
            return at, at + 1
        begin, end, lo, hi = self._pieces[low - 1]
        return (lo, hi) if begin <= at < end else (hi + at - end, hi + at - end + 1)

    def is_word_before(self, at: int) -> bool:
        """Whether a letter or digit ends there."""
        return _is_word(self.text[max(0, at - 4) : at].decode("utf-8", "ignore")[-1:])

    def is_word_at(self, at: int) -> bool:
        """Whether a letter or digit begins there."""
        return _is_word(self.text[at : at + 4].decode("utf-8", "ignore")[:1])


def _pieces(run: bytes) -> Iterator[tuple[bytes, int]]:
    """(normal form, bytes that it comes from) of what together makes a run: its characters, or all of it where they
    combine. A run that is no UTF-8 stays as it is."""
    try:
        text = run.decode()
    except UnicodeDecodeError:
        yield run, len(run)
        return
    normal = _normal(text)
    if normal == text:
        yield run, len(run)
        return
    pieces = [(_normal(char).encode(), len(char.encode())) for char in text]
    if b"".join(piece for piece, _ in pieces) == normal.encode():
        yield from pieces
    else:
        yield normal.encode(), len(run)


def _normal(text: str) -> str:
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def _is_word(char: str) -> bool:
    return char.isalnum() and char < _DENSE
