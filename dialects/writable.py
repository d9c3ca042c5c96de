"""What a dialect writes of a reply, whoever made it: an engine of ours
(`millrace.producers.gateway.calls.engine_call`), or an upstream of another API (`millrace.dialects.translation`).

Invariant: a dialect asks nothing else of a call, so what it can write of one it can write of the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from millrace.dialects.conversation import Ask, Part
from millrace.schemas.json_values import JsonObject


class WritableChoice(Protocol):
    """One of the replies. Token ids and what belongs to them are as the engine gave them: none of an upstream."""

    @property
    def index(self) -> int:
        """Its number."""

    @property
    def ids(self) -> Sequence[int]:
        """Token ids."""

    @property
    def logprobs(self) -> Sequence[float]:
        """Log-probabilities of the tokens, natural logarithm."""

    @property
    def tops(self) -> Sequence[Iterable[tuple[int, float]]]:
        """(token id, log-probability) of the rivals of each token."""

    @property
    def calls(self) -> Sequence[JsonObject]:
        """Tool calls as messages of chat completions hold them."""

    @property
    def content(self) -> str | None:
        """Its text."""

    @property
    def reasoning(self) -> str | None:
        """Its thoughts."""

    @property
    def reason(self) -> str:
        """OpenAI's finish reason; abort for a reply that was cut off."""

    @property
    def stop(self) -> str | int | None:
        """The stop string that ended it, where one did."""

    def parts(self) -> Sequence[Part]:
        """The whole reply: its thoughts, its text, its calls, of each what there is."""

    def message(self) -> JsonObject:
        """The assistant message of chat completions."""


class WritableCall(Protocol):
    """One request and its replies."""

    @property
    def request(self) -> Ask:
        """What was asked."""

    @property
    def response_id(self) -> str:
        """The id of the response."""

    @property
    def when(self) -> int:
        """When it was asked, microseconds since 1970."""

    @property
    def choices(self) -> Sequence[WritableChoice]:
        """The replies."""

    @property
    def temperature(self) -> float:
        """At which it is sampled."""

    @property
    def top_p(self) -> float:
        """With which it is sampled."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def completion_tokens(self) -> int:
        """Tokens of all replies so far."""

    @property
    def cached(self) -> int:
        """Tokens of the prompt that had been read before, as far as anybody says."""

    @property
    def is_shortened(self) -> bool:
        """Whether replies may have fewer tokens than were asked for, since the context has no room for more."""

    @property
    def keeps(self) -> bool:
        """Whether later requests may name its response."""

    def token(self, id: int) -> str:
        """The text of a token."""

    def token_bytes(self, id: int) -> bytes:
        """The bytes of a token."""
