"""Rows as something to learn from: demonstrations, pairs, prompts. What is none is refused with its place and reason.

    demonstrations   {"messages": [...]}  |  {"prompt": P, "completion": R}  |  {"tokens": [...], "mask": [...]}
    rated replies    a demonstration with "label": true, false, 1 or 0
    pairs            {"prompt": P, "chosen": R, "rejected": R}  |  {"chosen": [...], "rejected": [...]} of messages
    prompts          {"prompt": P}  |  {"messages": [...]}, up to the last one that is no assistant's

P and R are text, messages, or token ids. Invariants: a row is read whole or refused, never cut; items keep the order of
their rows; equal rows and the same tokenizer give equal items, and `digest` says so. All tokens are held in memory.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from millrace.trainers.batches.sample import Sample
from millrace.trainers.errors import BadData
from millrace.trainers.offline.rows import DataRow
from millrace.trainers.offline.text import Encoder, MarkedTokens, is_messages, is_tokens

Make = Callable[[Mapping[str, object], Encoder], list[MarkedTokens]]
Rate = Callable[[Mapping[str, object]], float | None]
"""The reward that a row of one sequence names. Raises BadData where it should and does not."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One sequence: tokens int32[T], mask uint8[T], 1 where it trains."""

    tokens: NDArray[np.int32]
    mask: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class OfflineItem:
    """What one row became: one sequence with the reward that its row names, if any, or the chosen and the rejected one
    of a pair."""

    where: str
    readings: tuple[TokenSequence, ...]
    reward: float | None = None

    def samples(self, seq: int, version: int = 0) -> list[Sample]:
        """The item as samples of one group; of a pair the chosen one has the higher reward."""
        return [
            Sample(
                tokens=reading.tokens,
                mask=reading.mask,
                logprobs=np.zeros(len(reading.tokens), np.float32),
                versions=np.where(reading.mask != 0, version, -1).astype(np.int32),
                reward=self.reward if len(self.readings) == 1 else float(place == 0),
                seq=seq,
                group=str(seq),
                trajectory=f"{seq}.{place}",
            )
            for place, reading in enumerate(self.readings)
        ]


@dataclass(slots=True)
class Data:
    """items, and how many rows were refused for which reason."""

    items: list[OfflineItem] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def digest(self) -> str:
        """sha256 hex of all tokens, masks and rewards, in order."""
        out = hashlib.sha256()
        for item in self.items:
            if item.reward is not None:
                out.update(f"reward {item.reward!r}".encode())
            for reading in item.readings:
                out.update(len(reading.tokens).to_bytes(8, "little"))
                out.update(reading.tokens.tobytes())
                out.update(reading.mask.tobytes())
        return out.hexdigest()


def load(
    rows: Iterable[DataRow],
    make: Make,
    encoder: Encoder,
    *,
    vocabulary: int,
    longest: int,
    rate: Rate = lambda row: None,
    strict: bool = False,
    on_reject: Callable[[str, str], None] = lambda where, reason: None,
) -> Data:
    """All rows as items. `on_reject` hears the place and the reason of each row that is none; strict: raises BadData at
    the first. Raises BadData when none is left."""
    data = Data()
    for row in rows:
        try:
            if row.problem is not None:
                raise BadData(row.problem)
            readings = tuple(_reading(marks, vocabulary, longest) for marks in make(row.content, encoder))
            reward = rate(row.content)
        except BadData as error:
            if strict:
                raise BadData(f"{row.where}: {error}") from error
            reason = str(error)
            data.refused[reason.partition(":")[0]] += 1
            on_reject(row.where, reason)
            continue
        data.items.append(OfflineItem(row.where, readings, reward))
    if not data.items:
        reasons = "; ".join(f"{reason} ({count})" for reason, count in data.refused.most_common(3))
        raise BadData(f"no row to learn from{': ' + reasons if reasons else ', the data is empty'}")
    return data


def _reading(marks: MarkedTokens, vocabulary: int, longest: int) -> TokenSequence:
    tokens, mask = np.array(marks[0], np.int64), np.array(marks[1], np.uint8)
    if len(tokens) > longest:
        raise BadData(f"too long: {len(tokens)} tokens, at most {longest} fit")
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise BadData(f"a token id outside the vocabulary: it goes from 0 to {vocabulary - 1}")
    return TokenSequence(tokens.astype(np.int32), mask)


def demonstration(row: Mapping[str, object], encoder: Encoder) -> list[MarkedTokens]:
    """What to say."""
    if "tokens" in row:
        return [_exact(row)]
    if "messages" in row:
        return [_trains(encoder.conversation(_messages(row["messages"]), row.get("tools")))]
    if "prompt" in row and "completion" in row:
        return [_trains(encoder.exchange(row["prompt"], row["completion"], row.get("tools")))]
    raise BadData(f"no known shape: it has {_columns(row)}; wanted messages, prompt and completion, or tokens and mask")


def label(row: Mapping[str, object]) -> float:
    """1 of what is good, 0 of what is not."""
    value = row.get("label")
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        raise BadData("no label: it must be true, false, 1 or 0")
    return float(value)


def pair(row: Mapping[str, object], encoder: Encoder) -> list[MarkedTokens]:
    """The better one of two replies, then the other."""
    if "chosen" not in row or "rejected" not in row:
        raise BadData(f"no known shape: it has {_columns(row)}; wanted prompt, chosen and rejected")
    chosen, rejected = row["chosen"], row["rejected"]
    prompt = row.get("prompt")
    if prompt is None:
        chosen, rejected = _messages(chosen), _messages(rejected)
        if chosen[:-1] != rejected[:-1] or len(chosen) < 2:
            raise BadData("no known shape: without a prompt, chosen and rejected differ in their last message alone")
        prompt, chosen, rejected = chosen[:-1], chosen[-1:], rejected[-1:]
    exchanges = [_trains(encoder.exchange(prompt, reply, row.get("tools"))) for reply in (chosen, rejected)]
    if exchanges[0] == exchanges[1]:
        raise BadData("chosen and rejected are the same")
    return exchanges


def prompt(row: Mapping[str, object], encoder: Encoder) -> list[MarkedTokens]:
    """What to answer; nothing of it trains."""
    if "prompt" in row:
        tokens = encoder.prompt(row["prompt"], row.get("tools"))
    elif "messages" in row:
        messages = _messages(row["messages"])
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages:
            raise BadData("no message to answer")
        tokens = encoder.prompt(messages, row.get("tools"))
    else:
        raise BadData(f"no known shape: it has {_columns(row)}; wanted prompt or messages")
    if not tokens:
        raise BadData("an empty prompt")
    return [(tokens, [0] * len(tokens))]


def _exact(row: Mapping[str, object]) -> MarkedTokens:
    tokens, mask = row["tokens"], row.get("mask")
    if not is_tokens(tokens) or not isinstance(mask, list) or not all(type(x) is int and x in (0, 1) for x in mask):
        raise BadData("tokens and mask must be lists of token ids and of 0 and 1")
    if len(tokens) != len(mask):
        raise BadData(f"tokens and mask differ in length: {len(tokens)} and {len(mask)}")
    return _trains((tokens, mask))


def _trains(marks: MarkedTokens) -> MarkedTokens:
    if not any(marks[1]):
        raise BadData("nothing of it trains")
    if marks[1][0]:
        raise BadData("its first token would train, but nothing comes before it to predict it")
    return marks


def _messages(value: object) -> list[Mapping[str, object]]:
    if not is_messages(value):
        raise BadData("messages must be a list of objects with role and content")
    return value


def _columns(row: Mapping[str, object]) -> str:
    return ", ".join(sorted(row)) or "no column"
