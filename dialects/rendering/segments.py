"""Token ids of text, remembered piece by piece between special tokens.

A conversation is mostly what it was a turn ago, so most pieces are known. Tokenizing new ones lets go of Python's lock,
so that other threads go on meanwhile.

Invariants: the ids are those that the tokenizer gives for the whole text; where its parts do not make that certain
(tokens that take in their neighbours, a form of text that depends on what stands before), the text is one piece; a
text that must be longer than the limit, by its bytes alone, is not tokenized at all."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import Tokenizer

from millrace.dialects.rendering.base import PromptTooLong
from millrace.dialects.rendering.words import Words

logger = logging.getLogger(__name__)

CACHE_BYTES = 16 << 20
"""bytes, about, of each of the two generations of pieces that are remembered"""
TOKEN_BYTES = 40
BATCH = 64 << 10
"""characters that are searched at once for special tokens, and tokenized before their number is compared with the
limit"""
CUTS = 1024
"""tokens, beside a fiftieth of the limit, by which the parts of a text may have more than the whole: each of its parts
has up to `BATCH` of them, and at its ends a few more than in the whole"""
SHRINKS = 4
"""how much shorter a normalizer may make a text, in characters"""
NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD")
PROBES = ("a", " a", "a ", "\n", " \n ", "\u00e9", "e\u0301", "it's", "1 2", "  ", "\u4e2d x! ?\n\n  y")


class Segments:
    """`core` with its description (the content of tokenizer.json)."""

    def __init__(self, core: Tokenizer, description: Mapping[str, Any]) -> None:
        self.limit: int | None = None
        """tokens beyond which PromptTooLong is raised"""
        self._core = core
        self._new: dict[str, list[int]] = {}
        self._old: dict[str, list[int]] = {}
        self._size = 0
        tokens = [token for token in description.get("added_tokens", ()) if token["content"]]
        self._specials = {token["content"]: [int(token["id"])] for token in tokens if not token["normalized"]}
        self._overlap = max(map(len, self._specials), default=0)
        self._split = _splitter(self._specials) if self._specials and independent(description) else None
        self._words = Words(core, description) if self._split is not None else None
        if self._split is not None and not self._alike():
            logger.warning("this tokenizer's text is not remembered in pieces: they would not give the same tokens")
            self._split = self._words = None
        if self._split is None:
            self._specials = {}
        self._longest = longest_token(description)

    def encode(self, text: str) -> list[int]:
        """The ids of a text; special tokens written in it are recognised. Raises PromptTooLong."""
        limit = self.limit
        if limit is not None and self._longest and len(text) > limit * self._longest:
            raise PromptTooLong(f"a prompt of {len(text)} characters is longer than {limit} tokens")
        pieces = self._pieces(text)
        specials = self._specials
        self._learn([piece for piece in pieces if piece not in specials and piece not in self._new], limit)
        ids: list[int] = []
        for piece in pieces:
            piece_ids = specials.get(piece) or self._new.get(piece)
            # It may have been let go of in between, for others of this text or in another thread.
            ids += piece_ids if piece_ids is not None else self._fresh([piece])[0]
        return ids

    def _pieces(self, text: str) -> list[str]:
        if self._split is None:
            return [text] if text else []
        if len(text) < BATCH:
            return [piece for piece in self._split.split(text) if piece]
        pieces, at = list[str](), 0
        for begin in range(0, len(text), BATCH):
            # A window and a match at a time: one call for all of it would keep Python's lock throughout.
            end = begin + BATCH
            for match in self._split.finditer(text, max(begin, at), end + self._overlap):
                if match.start() >= end:
                    break
                if match.start() > at:
                    pieces.append(text[at : match.start()])
                pieces.append(match.group())
                at = match.end()
        return [*pieces, text[at:]] if at < len(text) else pieces

    def _learn(self, pieces: list[str], limit: int | None) -> None:
        """Remember pieces, the newest for longest."""
        missing: list[str] = []
        count = waiting = 0
        for piece in dict.fromkeys(pieces):
            ids = self._old.get(piece)
            if ids is not None:
                self._keep(piece, ids)
                continue
            if self._split is not None and limit is not None and len(piece) > max(BATCH, 2 * limit):
                self._weigh(piece, limit)
            missing.append(piece)
            waiting += len(piece)
            if waiting > BATCH:
                count += self._tokenize(missing)
                missing, waiting = [], 0
                if limit is not None and count > limit:
                    raise PromptTooLong(f"a prompt of over {count} tokens is longer than {limit}")
        if missing:
            self._tokenize(missing)

    def _weigh(self, piece: str, limit: int) -> None:
        """Raise PromptTooLong for a piece of far more tokens than the limit, part by part: the millions of tokens of
        the whole would be let go of in one step that keeps Python's lock."""
        most, count = limit + limit // 50 + CUTS, 0
        for at in range(0, len(piece), BATCH):
            (part,) = self._core.encode_batch_fast([piece[at : at + BATCH]], add_special_tokens=False)
            count += len(part)
            if count > most:
                raise PromptTooLong(f"a prompt of about {count} tokens or more is longer than {limit}")

    def _tokenize(self, pieces: list[str]) -> int:
        id_lists = self._fresh(pieces)
        for piece, ids in zip(pieces, id_lists, strict=True):
            self._keep(piece, ids)
        return sum(map(len, id_lists))

    def _fresh(self, pieces: list[str]) -> list[list[int]]:
        word_ids = [self._words.encode(piece) if self._words is not None else None for piece in pieces]
        rest = [piece for piece, ids in zip(pieces, word_ids, strict=True) if ids is None]
        # Unlike encode, this lets go of Python's lock, and computes no offsets.
        encodings = self._core.encode_batch_fast(rest, add_special_tokens=False) if rest else []
        limit, count = self.limit, sum(map(len, encodings))
        if limit is not None and count > limit:  # before they are made numbers of Python's, which keeps its lock
            raise PromptTooLong(f"a prompt of over {count} tokens is longer than {limit}")
        queue = iter(encodings)
        return [next(queue).ids if ids is None else ids for ids in word_ids]

    def _keep(self, piece: str, ids: list[int]) -> None:
        size = len(piece) + TOKEN_BYTES * len(ids)
        if self._size + size > CACHE_BYTES:
            self._old, self._new, self._size = self._new, {}, 0
        self._new[piece] = ids
        self._size += size

    def _alike(self) -> bool:
        """Whether pieces give the tokens of the whole, tried around every special token."""
        for special in self._specials:
            text = "".join(f"{probe}{special}{probe}{special}" for probe in PROBES)
            if self.encode(text) != self._core.encode(text, add_special_tokens=False).ids:
                return False
        self._new, self._old, self._size = {}, {}, 0
        return True


def independent(description: Mapping[str, Any]) -> bool:
    """Whether text between special tokens is tokenized without regard to what stands around it."""
    is_plain = all(
        not (token["lstrip"] or token["rstrip"] or token["single_word"]) for token in description["added_tokens"]
    )
    return is_plain and _known_parts(description)


def longest_token(description: Mapping[str, Any]) -> int:
    """Most characters of text that one token can stand for; 0 where there is no such bound."""
    model = description["model"]
    if not _known_parts(description) or model.get("unk_token") is not None:
        return 0
    longest = max(map(len, [*model["vocab"], *(token["content"] for token in description["added_tokens"])]), default=0)
    return longest * (SHRINKS if description.get("normalizer") else 1)


def _known_parts(description: Mapping[str, Any]) -> bool:
    """Whether the tokenizer is made of parts that drop nothing and look at one piece at a time."""
    model = description["model"]
    return (
        description.get("truncation") is None
        and description.get("padding") is None
        and model.get("type") == "BPE"
        and not model.get("dropout")
        and all(part["type"] in NORMALIZERS for part in _parts(description.get("normalizer"), "normalizers"))
        and all(map(_looks_at_one_piece, _parts(description.get("pre_tokenizer"), "pretokenizers")))
        and all(
            part["type"] in ("ByteLevel", "TemplateProcessing")
            for part in _parts(description.get("post_processor"), "processors")
        )
    )


def _looks_at_one_piece(part: Mapping[str, Any]) -> bool:
    match part["type"]:
        case "ByteLevel":
            return part["add_prefix_space"] is False
        case "Split":
            return part["behavior"] in ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
        case "Digits":
            return True
        case _:
            return False


def _parts(part: Mapping[str, Any] | None, inner: str) -> Iterable[Mapping[str, Any]]:
    if part is None:
        return
    if part["type"] == "Sequence":
        for one in part[inner]:
            yield from _parts(one, inner)
    else:
        yield part


def _splitter(tokens: Iterable[str]) -> re.Pattern[str]:
    """Splits at the leftmost token, the longest where several begin, as the tokenizer does. Written as a tree, so that
    its time does not grow with the number of tokens."""
    tree: dict[str, Any] = {}
    for token in tokens:
        node = tree
        for letter in token:
            node = node.setdefault(letter, {})
        node[""] = {}
    return re.compile(f"({_branches(tree)})")


def _branches(node: dict[str, Any]) -> str:
    inner = [re.escape(letter) + _branches(below) for letter, below in node.items() if letter]
    if not inner:
        return ""
    pattern = inner[0] if len(inner) == 1 and "" not in node else f"(?:{'|'.join(inner)})"
    return f"{pattern}?" if "" in node else pattern
