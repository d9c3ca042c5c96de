"""Replies of which the log has the text alone (a provider's, imported ones, spans, and ours that were held to a shape),
as samples that imitation can learn from.

Each reply is written once, behind the very prompt that the branch's own model would be given for it. Replies whose
prompt begins with all of an earlier reply's tokens share its sample, so a conversation costs as little as the form of
the model allows, and a form that rewrites history only makes more samples, never another prompt.

Invariants: mask is 1 on exactly the tokens of replies of the given calls, each with the token that ends it, and 0 on
everything that a client sent, whoever it says has said it; no reply trains twice, nor one that was cut off, superseded
or taken out of its sample for more than having no exact tokens; log-probabilities are 0 and versions -1, since nobody
here saw a token sampled. Pure, but for the renderer's files, which are read when the first text is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b

import numpy as np

from millrace.dialects.dialogue import NO_LESSON, Unsayable, is_usable, lesson
from millrace.dialects.rendering.base import Renderer
from millrace.dialects.rendering.foreign_reply import TOO_LONG, Speech, Unspoken, speech_of
from millrace.infra.engines.upstream import UNTRAINABLE
from millrace.infra.errors import ConfigError
from millrace.infra.log.history.requests import whole_calls
from millrace.infra.log.history.rows import Row
from millrace.schemas.records import Event, ModelCall, Trajectory
from millrace.trainers.batches.sample import Sample, check
from millrace.trainers.errors import BadSample

TEXT = frozenset({UNTRAINABLE, "imported", "observed", "constrained", "altered_sampling", "greedy"})
"""reasons of calls that lack nothing but exact tokens of an unaltered draw"""
HAS_SUCCESSOR = "another reply took its place"
UNCHAT = "it is no chat in text"
UNKNOWN_ID = "it has tokens outside the model's vocabulary"


@dataclass(slots=True)
class Texts:
    """The samples of a trajectory's text. replies: how many are written in them; refusals: the others, by reason."""

    samples: list[Sample] = field(default_factory=list)
    replies: int = 0
    refusals: Counter[str] = field(default_factory=Counter)

    @property
    def digest(self) -> str:
        """blake2b hex over the tokens and masks of all samples, in order; empty where there are none."""
        if not self.samples:
            return ""
        hasher = blake2b(digest_size=16)
        for sample in self.samples:
            hasher.update(sample.length.to_bytes(8, "little") + sample.tokens.tobytes() + sample.mask.tobytes())
        return hasher.hexdigest()


class Writer:
    """Writes text for a model that takes token ids below `vocabulary`, at most `longest` a sample. choose: gives its
    renderer, or raises ConfigError where it has no form to write in."""

    def __init__(self, choose: Callable[[], Renderer], vocabulary: int, longest: int) -> None:
        self._choose = choose
        self._vocabulary = vocabulary
        self._longest = longest

    @cached_property
    def renderer(self) -> Renderer | str:
        """What writes, or why nothing does."""
        try:
            choice = self._choose()
        except ConfigError as error:
            return str(error)
        choice.limit_to(self._longest)
        return choice

    @property
    def name(self) -> str:
        """Of the form that the text was written in."""
        return "" if isinstance(self.renderer, str) else self.renderer.name

    def texts(self, record: Trajectory, calls: Sequence[Row[Event]]) -> Texts:
        """The samples of a sealed trajectory's text. calls: those of its events that are cleared, in order."""
        out = Texts()
        if not is_usable(record):
            return out
        bodies = whole_calls(calls)
        former = {body["supersedes"] for body in bodies if body["supersedes"]}
        reasons = dict(entry.rpartition(":")[::2] for entry in record["excluded"])
        spoken_replies: list[Speech] = []
        for body in bodies:
            if body["trainable"] or body["untrainable_reason"] not in TEXT:
                continue
            if reasons.get(body["response_id"]) != body["untrainable_reason"]:
                continue
            try:
                spoken_replies.append(self._speak(record, body, is_superseded=body["response_id"] in former))
            except Unspoken as error:
                out.refusals[str(error)] += 1
        for tokens, mask, replies in join_replies(spoken_replies):
            sample = _sample(record, tokens, mask, len(record["lineages"]) + len(out.samples))
            try:
                check([sample], vocabulary=self._vocabulary, longest=self._longest)
            except BadSample:
                out.refusals[TOO_LONG if sample.length > self._longest else UNKNOWN_ID] += replies
            else:
                out.samples.append(sample)
                out.replies += replies
        return out

    def _speak(self, record: Trajectory, body: ModelCall, *, is_superseded: bool) -> Speech:
        """Raises Unspoken."""
        if is_superseded:
            raise Unspoken(HAS_SUCCESSOR)
        try:
            chat = lesson(record, body)
        except Unsayable as error:
            raise Unspoken(str(error) if error.code in NO_LESSON else f"{UNCHAT} ({error.code})") from None
        if isinstance(self.renderer, str):
            raise Unspoken(self.renderer)
        return speech_of(self.renderer, chat.messages, chat.reply, chat.tools or None)


def join_replies(replies: Iterable[Speech]) -> list[tuple[list[int], list[int], int]]:
    """Tokens, mask and number of replies of each sample: a reply goes on with the longest sample that its prompt begins
    with; one that was there already is left out."""
    samples: list[tuple[list[int], list[int], int]] = []
    open_: dict[bytes, int] = {}
    pairs: set[tuple[bytes, bytes]] = set()
    for prompt, reply in replies:
        data, tail = _bytes(prompt), _bytes(reply)
        if (data, tail) in pairs:
            continue
        pairs.add((data, tail))
        digest, at, goes_on = blake2b(digest_size=16), 0, None
        for end in sorted({len(tokens) for tokens, *_ in samples if len(tokens) <= len(prompt)}):
            digest.update(data[at * 4 : end * 4])
            at, goes_on = end, open_.get(digest.digest(), goes_on)
        if goes_on is None:
            goes_on = len(samples)
            samples.append(([], [], 0))
        else:
            del open_[blake2b(_bytes(samples[goes_on][0]), digest_size=16).digest()]
        tokens, mask, count = samples[goes_on]
        fresh = len(prompt) - len(tokens)
        samples[goes_on] = [*prompt, *reply], [*mask, *[0] * fresh, *[1] * len(reply)], count + 1
        open_[blake2b(data + tail, digest_size=16).digest()] = goes_on
    return samples


def _bytes(ids: Sequence[int]) -> bytes:
    return np.array(ids, np.int32).tobytes()


def _sample(record: Trajectory, tokens: Sequence[int], mask: Sequence[int], lineage: int) -> Sample:
    size = len(tokens)
    return Sample(
        tokens=np.array(tokens, np.int32),
        mask=np.array(mask, np.uint8),
        logprobs=np.zeros(size, np.float32),
        versions=np.full(size, -1, np.int32),
        reward=None,
        seq=0,
        group=record["group"],
        trajectory=record["id"],
        lineage=lineage,
    )
