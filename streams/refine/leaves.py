"""What a detector reads of an event: one buffer of all its strings, and which bytes of it belong to which string.

A value is laid out as `key: "value"`, because rules need the name of a secret as much as the secret. Log-probabilities
spell a reply token by token, so their tokens are also laid out as the text they make.

Invariants: leaves lie in the buffer in ascending order and do not overlap; between two of them stands SEPARATOR; one
event has at most `bounds.LEAVES` of them, and making them takes time linear in its bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import orjson

from millrace.schemas import bounds
from millrace.streams.refine.documents import KEY, NUMBER, STRING, Document, TooDeep, document
from millrace.streams.refine.strings import String

SEPARATOR = b"\n\x00\n"
"""between leaves in the buffer; no value of ours spans it"""
TOKEN_KEYS = frozenset({b"logprobs", b"top_logprobs", b"prompt_logprobs", b"token_ids", b"prompt_token_ids"})
"""keys of a document under which a reply or a prompt stands once more, token by token"""


class TooMuch(Exception):
    """An event is beyond a bound of what is looked into. `code` is machine-readable."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class LeafKind(Enum):
    """What a leaf is, and so what becomes of it when something in it has to go."""

    NAME = "name"
    """replaced as a whole"""
    TEXT = "text"
    """a whole field; spans are cut out"""
    STRING = "string"
    """a string of a document; spans are cut out"""
    NUMBER = "number"
    """a number of a document; becomes a string with spans cut out"""
    KEY = "key"
    """a key of a document; spans are cut out unless they reach into its value"""
    TOKENS = "spelled"
    """a list or map under a key of TOKEN_KEYS; taken out as a whole"""


_KINDS = {KEY: LeafKind.KEY, STRING: LeafKind.STRING, NUMBER: LeafKind.NUMBER}


class Leaf(NamedTuple):
    """Bytes [start, end) of the buffer, which are bytes [lo, hi) of string number `source`."""

    kind: LeafKind
    start: int
    end: int
    source: int
    lo: int
    hi: int


@dataclass(slots=True)
class Buffer:
    """Collects strings. `add` raises TooMuch."""

    sources: list[String] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)
    documents: dict[int, Document] = field(default_factory=dict)
    """the sources that are documents"""
    token_lists: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """what stands under keys of TOKEN_KEYS in each of them"""
    _parts: list[bytes] = field(default_factory=list)
    _at: int = 0
    _text: bytes = b""

    @property
    def text(self) -> bytes:
        """What detectors read."""
        if len(self._text) != self._at:
            self._text = b"".join(self._parts)
        return self._text

    def text_of(self, leaf: Leaf) -> bytes:
        """What a leaf reads."""
        return self.text[leaf.start : leaf.end]

    def add(self, strings: Iterable[String]) -> None:
        """Lay out strings behind what is there."""
        for string in strings:
            source = len(self.sources)
            self.sources.append(string)
            data = string.value.encode() if isinstance(string.value, str) else string.value
            if not string.text:
                self._leaf(LeafKind.NAME, source, 0, len(data), data)
            elif (content := _document(data)) is not None:
                self.documents[source] = content
                self._document(source, content)
            elif data:
                self._leaf(LeafKind.TEXT, source, 0, len(data), _utf8(string.value, data))

    def _document(self, source: int, document: Document) -> None:
        ahead: list[tuple[int, int]] = []
        for token in document.tokens():
            while ahead and token.lo >= ahead[-1][1]:
                ahead.pop()
            if ahead and token.lo >= ahead[-1][0]:
                continue
            kind = _KINDS[token.kind]
            self._leaf(kind, source, token.lo, token.hi, token.value, token.beside)
            if kind is LeafKind.KEY and token.value in TOKEN_KEYS and source not in self.token_lists:
                self.token_lists[source] = document.values_of(TOKEN_KEYS)
                ahead = self.token_lists[source][::-1]
        for lo, hi in self.token_lists.get(source, ()):
            self._leaf(LeafKind.TOKENS, source, lo, hi, _as_text(document.data[lo:hi]))

    def _leaf(self, kind: LeafKind, source: int, lo: int, hi: int, text: bytes, beside: bool = False) -> None:
        if len(self.leaves) >= bounds.LEAVES:
            raise TooMuch("too_many_leaves")
        after = SEPARATOR
        if beside:
            is_string = kind is LeafKind.STRING
            self._parts[-1] = b': "' if is_string else b": "
            self._at += len(self._parts[-1]) - len(SEPARATOR)
            after = b'"' + SEPARATOR if is_string else SEPARATOR
        end = self._at + len(text)
        self.leaves.append(Leaf(kind, self._at, end, source, lo, hi))
        self._parts += (text, after)
        self._at = end + len(after)


def _document(data: bytes) -> Document | None:
    try:
        return document(data)
    except TooDeep:
        raise TooMuch("too_deep") from None


def _utf8(value: str | bytes, data: bytes) -> bytes:
    return data if isinstance(value, str) else data.decode("utf-8", "replace").encode()


def _as_text(data: bytes) -> bytes:
    """What log-probabilities spell: the sampled tokens as one text, then every string that is among them once."""
    value = orjson.loads(data)
    lists = value.values() if isinstance(value, dict) else ()
    items = [item for entry in lists if isinstance(entry, list) for item in entry]
    tokens = (item.get("token") if isinstance(item, dict) else item for item in items)
    text = "".join(token for token in tokens if isinstance(token, str)).encode()
    return SEPARATOR.join([text, *Document(data).values()])
