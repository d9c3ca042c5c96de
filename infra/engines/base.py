"""The engine seam: tokens in, tokens out, with the log-probability and the weight version of every token.

Invariants that every sibling keeps (`tests/infra/engines/test_conformance.py`):

- Prompts are token ids and are used as they are. Outputs are the sampled ids, the ending token included; a stop string
  ends a choice but is not cut out of its ids.
- `logprobs[i]` is the raw log-softmax of the model at that position: temperature 1, before penalties, biases, min-p,
  top-k and top-p (vLLM's default `logprobs_mode`, "raw_logprobs"). At temperature 1 without any of these it is the
  sampled distribution. Under a grammar it is taken over the tokens that the grammar allows.
- Chunks of one choice arrive in order; the last one, and only it, carries `finish_reason` and the version spans, which
  cover all its tokens without gap. Tokens sampled after a weight swap carry the new label, in the same choice.
- Leaving the iterator early frees the request in the engine.
- A failure before the first chunk may be retried by the engine itself; after it, never.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace.infra.errors import EngineRejected
from millrace.schemas import bounds
from millrace.schemas.labels import parse_label

ABORT = "abort"
"""the finish reason of a reply that was cut off"""
LEAST_REPETITION = 1e-6
"""penalties on repetition below it take logits, which they divide, out of what 32 bits hold"""


class LabelSpan(NamedTuple):
    """Output tokens [start, end) of a choice were sampled by the weights labelled `label`."""

    label: str
    start: int
    end: int


class Usage(NamedTuple):
    """Token counts of one request: its prompt, all its choices together, prompt tokens taken from a cache."""

    prompt: int
    completion: int
    cached: int


class Grammar(NamedTuple):
    """What outputs are held to. `json`: JSON of the schema `text`; `structural_tag`: what xgrammar's structural tag
    `text` describes."""

    kind: Literal["json", "structural_tag"]
    text: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. `temperature` is 0 (greedy) to 2, `top_k` 0 and `top_p` 1 are off, `stop` are strings of
    the output text, `stop_ids` are token ids beside the model's own end tokens, `n` is how many choices,
    `top_logprobs` (0 to 19) how many most likely tokens to report at each position. Penalties of 0, a
    `repetition_penalty` of 1 and a `min_p` of 0 are off; `logit_bias` is (token id, what is added to its logit)."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    n: int = 1
    ignore_eos: bool = False
    top_logprobs: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        """Raises EngineRejected for a value that no engine takes."""
        checks = (
            (self.max_tokens >= 1, f"max_tokens must be at least 1, not {self.max_tokens}"),
            (0.0 <= self.temperature <= 2.0, f"temperature must be 0 to 2, not {self.temperature}"),
            (0.0 < self.top_p <= 1.0, f"top_p must be in (0, 1], not {self.top_p}"),
            (0 <= self.top_k <= bounds.INT, f"top_k must be 0 (off) to {bounds.INT}, not {self.top_k}"),
            (self.n >= 1, f"n must be at least 1, not {self.n}"),
            (0 <= self.top_logprobs < 20, f"top_logprobs must be 0 to 19, not {self.top_logprobs}"),
            (all(self.stop), "a stop string must not be empty"),
            (abs(self.presence_penalty) <= 2.0, f"presence_penalty must be -2 to 2, not {self.presence_penalty}"),
            (abs(self.frequency_penalty) <= 2.0, f"frequency_penalty must be -2 to 2, not {self.frequency_penalty}"),
            (
                LEAST_REPETITION <= self.repetition_penalty <= 2.0,
                f"repetition_penalty must be {LEAST_REPETITION:.6f} to 2, not {self.repetition_penalty}",
            ),
            (0.0 <= self.min_p <= 1.0, f"min_p must be 0 to 1, not {self.min_p}"),
            (
                all(token >= 0 and abs(bias) <= 100.0 for token, bias in self.logit_bias),
                "logit_bias must give token ids numbers from -100 to 100",
            ),
        )
        for is_valid, message in checks:
            if not is_valid:
                raise EngineRejected(message, status=400)

    @property
    def from_policy(self) -> bool:
        """Whether tokens are drawn from the very distribution whose log-probabilities engines report."""
        return self.temperature == 1 and self.top_p == 1 and self.top_k == 0 and not self.is_biased

    @property
    def is_biased(self) -> bool:
        """Whether penalties, a bias or min_p change the distribution."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1
            or self.min_p
            or self.logit_bias
        )

    @property
    def remembers(self) -> bool:
        """Whether what is drawn, or where it ends, depends on the tokens of this request that were drawn before, beyond
        what the model reads: then the rest of an output cannot be asked for apart."""
        return bool(self.stop or self.grammar or self.presence_penalty or self.frequency_penalty)


@dataclass(slots=True)
class Chunk:
    """New tokens of one choice. `finish_reason` is stop, length or abort; `stop_reason` the stop string or stop id that
    ended it (None for the model's own end token). `spans` come with `finish_reason`, `usage` with the last chunk of the
    request. `tops` has the most likely (token id, log-probability) pairs of each position, best first, if asked for."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    spans: tuple[LabelSpan, ...] = ()
    usage: Usage | None = None
    tops: Sequence[Sequence[tuple[int, float]]] = ()

    def extend(self, later: Chunk) -> None:
        """Take in the chunk that follows this one in the same choice."""
        self.token_ids.extend(later.token_ids)
        self.logprobs.extend(later.logprobs)
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
        self.spans, self.usage, self.tops = later.spans, later.usage, [*self.tops, *later.tops]


class Engine(ABC):
    """One inference engine. Safe for concurrent use from one event loop."""

    kind: str
    """what it is, for the record: vllm, sglang, inprocess"""
    adapter: str | None = None
    """The adapter that requests from now on ask for, its name being the label of its version; None: the engine's own
    weights, which is all that engines without adapters have."""

    @abstractmethod
    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str, stream: bool = True
    ) -> AsyncGenerator[Chunk, None]:
        """Sample `sampling.n` choices after `prompt_ids`.

        With `stream` a chunk leaves as soon as its token exists; without, one chunk a choice once all are done (cheaper
        by far for a server that sends JSON). Raises EngineRejected (a bad request, never retry), EngineUnavailable (try
        again, or another engine), EngineTimeout (no byte for too long)."""

    @abstractmethod
    async def health(self) -> bool:
        """Whether the engine answers. A paused engine is healthy."""

    @abstractmethod
    async def weight_version(self) -> str:
        """The label of the loaded weights; `millrace.schemas.labels.parse_label` reads it. Raises EngineUnavailable."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of every resource. Idempotent."""


def token_versions(spans: Sequence[LabelSpan], length: int, policy: str) -> NDArray[np.int32]:
    """Version of each of `length` output tokens, int32 [length]; -1 where the label is not one of `policy`'s."""
    versions = np.full(length, -1, np.int32)
    for span in spans:
        label = parse_label(span.label)
        if label is not None and label[0] == policy:
            versions[span.start : span.end] = label[1]
    return versions
