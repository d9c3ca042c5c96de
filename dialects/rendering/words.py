"""Token ids of short plain text by looking up its words, for byte-level BPE.

Such a tokenizer cuts text into words by a regular expression and merges bytes within each word, and words come again
and again. Cutting with Python's `re` and looking words up takes a third of the time that tokenizing takes.

Invariants: the ids are those of the tokenizer. Only text of characters on whose classes both regular expression engines
are certain to agree is cut here, only by expressions whose every part is known, and only if the matches are the whole
text; everything else is left to the tokenizer (`encode` gives None)."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

LONGEST = 8192
"""characters; longer text is for the tokenizer, which lets go of Python's lock"""
WORD = 64
"""characters of a word that is remembered"""
MOST_WORDS = 100_000
"""words that are remembered"""
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""how the part ByteLevel cuts by itself"""

# ASCII without controls, Latin, Greek, Cyrillic, and the Chinese characters of Unicode 1: their classes never change.
# Two letters that count as ASCII when case is ignored are left out.
RANGES = ((0x20, 0x7E), (0xA1, 0x17E), (0x391, 0x3A1), (0x3A3, 0x3C9), (0x410, 0x44F), (0x4E00, 0x9FA5))
SAFE = re.compile("[\t\n\r" + "".join(f"{chr(first)}-{chr(last)}" for first, last in RANGES) + "]*")
KNOWN_ESCAPES = frozenset("rnsSt-'/.?!*+()[]{}|\\")


def _class(kind: str) -> str:
    """The safe characters of a class of Unicode's, as the inside of brackets."""
    out = []
    for first, last in RANGES:
        run: list[int] = []
        for code in range(first, last + 2):
            if code <= last and unicodedata.category(chr(code))[0] == kind:
                run.append(code)
            elif run:
                out.append(f"{chr(run[0])}-{chr(run[-1])}")
                run = []
    return "".join(out)


CLASSES = {"L": _class("L"), "N": _class("N")}


class Words:
    """`core` with its description (the content of tokenizer.json)."""

    def __init__(self, core: Tokenizer, description: Mapping[str, Any]) -> None:
        self._pattern = _pattern(description)
        self._forms = _forms(description.get("normalizer"))
        self._model = core.model
        self._known: dict[str, list[int]] = {}
        self._bytes = _byte_letters()

    def encode(self, text: str) -> list[int] | None:
        """The ids of a text without special tokens; None for one that only the tokenizer can cut."""
        if self._pattern is None or len(text) > LONGEST or not SAFE.fullmatch(text):
            return None
        if not all(unicodedata.is_normalized(form, text) for form in self._forms):
            return None
        words: list[str] = self._pattern.findall(text)
        if sum(map(len, words)) != len(text):
            return None
        cache, ids = self._known, list[int]()
        for word in words:
            word_ids = cache.get(word)
            ids += word_ids if word_ids is not None else self._learn(word)
        return ids

    def _learn(self, word: str) -> list[int]:
        ids = [token.id for token in self._model.tokenize("".join([self._bytes[byte] for byte in word.encode()]))]
        if len(word) <= WORD:
            if len(self._known) >= MOST_WORDS:
                self._known = {}
            self._known[word] = ids
        return ids


def _pattern(description: Mapping[str, Any]) -> re.Pattern[str] | None:
    """The expression that cuts text into words, None where it is not certain."""
    model = description["model"]
    if any(token["normalized"] for token in description["added_tokens"]):
        return None
    if any(model.get(name) for name in ("unk_token", "continuing_subword_prefix", "end_of_word_suffix", "dropout")):
        return None
    source = _source(description.get("pre_tokenizer"))
    expression = None if source is None else _translate(source)
    try:
        pattern = None if expression is None else re.compile(expression)
    except re.error:
        return None
    return pattern if pattern is not None and pattern.groups == 0 else None


def _source(part: Mapping[str, Any] | None) -> str | None:
    """The tokenizer's own expression, where all its parts are known."""
    match part:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return GPT2
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(source)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return source
    return None


def _translate(source: str) -> str | None:
    """The expression as `re` reads it; None where a part of it is not known."""
    if "[[" in source or "&&" in source or (any(sign in source for sign in "^$") and _has_anchor(source)):
        return None
    out, at, inside = [], 0, False
    while at < len(source):
        if source.startswith("\\p{", at):
            kind = source[at + 3 : at + 5]
            if kind not in ("L}", "N}"):
                return None
            out.append(CLASSES[kind[0]] if inside else f"[{CLASSES[kind[0]]}]")
            at += 5
            continue
        letter = source[at]
        if letter == "\\":
            if source[at + 1 : at + 2] not in KNOWN_ESCAPES:
                return None
            out.append(source[at : at + 2])
            at += 2
            continue
        inside = letter == "[" or (inside and letter != "]")
        out.append(letter)
        at += 1
    return "".join(out)


def _has_anchor(source: str) -> bool:
    """Whether a sign of place stands outside the beginning of brackets."""
    return "$" in source or "^" in source.replace("[^", "")


def _forms(part: Mapping[str, Any] | None) -> list[Any]:
    """The forms of Unicode that a text must be in already."""
    if part is None:
        return []
    inner = part["normalizers"] if part["type"] == "Sequence" else [part]
    return [one["type"] for one in inner]


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary."""
    plain_bytes = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden_bytes = [byte for byte in range(256) if byte not in plain_bytes]
    letters = {byte: chr(byte) for byte in plain_bytes} | {byte: chr(256 + at) for at, byte in enumerate(hidden_bytes)}
    return [letters[byte] for byte in range(256)]
