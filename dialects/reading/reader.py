"""How one API's calls to an upstream are read for the log, from a copy: the seam beside `Dialect`.

Invariants: a request that nobody reads raises ApiError or ValueError, an answer nothing at all, and nobody's call ends
by it; what is read here is read alike from the log when a gateway starts (`Dialect.read`), else it is no call of this
API; nothing is parsed that is too deep, or of too many values, to be looked into (`shape.unwieldy`)."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import orjson

from millrace.dialects import match_keys, shape
from millrace.dialects.answers import AnswerChoice, WholeAnswer, bytes_in
from millrace.dialects.reading.events import LARGEST, ReplyEvents
from millrace.dialects.rendering.base import Message, Tools
from millrace.dialects.stored_responses import Recall, StoredRequest, StoredResponse
from millrace.schemas.json_values import Json

logger = logging.getLogger(__name__)

NO_ANSWER: Mapping[str, Json] = {}
ROOT = "/v1"
"""what an upstream's base url has already"""


class RecordedCall(NamedTuple):
    """A call of the capture log as lineages know it: what was asked, and the replies by their choice. `stored`: what
    was asked, where its response may be named by later requests. `behind`: what the request names of what was said
    before."""

    messages: list[Message]
    tools: Tools
    replies: dict[int, Message]
    stored: StoredRequest | None = None
    behind: str = ""


class RecordingDialect(Protocol):
    """The part of a `Dialect` that reads its calls from the log."""

    name: str
    path: str

    def read(self, request: bytes, response: Mapping[str, Json]) -> RecordedCall: ...


class ReadRequest(NamedTuple):
    """A request: its messages, and the digests that say what it continues. `stored`: what it said, where its response
    may be named by later requests."""

    messages: list[Message]
    digests: list[bytes]
    stored: StoredRequest | None = None


class NamedBefore(NamedTuple):
    """A request that names what was said before, `body`: its items in their places where it is `whole`, else as it
    came. `used`: the responses that it named, as far as they are known."""

    body: bytes
    used: Sequence[StoredResponse] = ()
    whole: bool = True


class ReadAnswer:
    """What an answer says, and the digest of the conversation with each of its choices, from `before`, that of
    the request. `told`: where in its response that is said."""

    def __init__(self, answer: WholeAnswer, before: bytes, told: object = None) -> None:
        self.answer = answer
        self.digests = [match_keys.extend(before, choice.message) for choice in answer.choices]
        self._told = told

    @cached_property
    def size(self) -> int:
        """Bytes of text that it says."""
        return bytes_in(self._told)


class DialectReader(ABC):
    """One API. `writer` says which dialect wrote a response."""

    told_in = "choices"
    """the field of its responses that holds what they say"""

    def __init__(self, dialect: RecordingDialect, writer: Callable[[Mapping[str, Json]], object]) -> None:
        self.dialect = dialect
        self._writer = writer

    @property
    def path(self) -> str:
        """Of its calls, below an upstream's base url."""
        return self.dialect.path.removeprefix(ROOT)

    @abstractmethod
    def answer_in(self, response: Mapping[str, Json]) -> WholeAnswer:
        """The answer in a response's fields."""

    @abstractmethod
    def assembler(self) -> ReplyEvents:
        """What puts a streamed answer together."""

    def read_request(self, body: bytes, *, is_whole: bool = True) -> ReadRequest:
        """Raises ApiError or ValueError for a request that nobody here understands. Not `is_whole`: what it names
        stands before its messages, and is not known."""
        call = self.dialect.read(body, NO_ANSWER)
        behind = None if is_whole else call.behind
        return ReadRequest(call.messages, match_keys.chain(call.messages, call.tools, behind), call.stored)

    def named(self, body: bytes, recall: Callable[[], Recall]) -> NamedBefore | None:
        """What a request names of what was said before, of all that its caller may name; None where it names nothing,
        or cannot be read. Raises ApiError for what another caller was told."""
        return None

    def flatten(self, body: bytes) -> bytes:
        """A whole request of what `named` gives, for an upstream that has nothing of what it names."""
        return body

    def answer(self, body: bytes, before: bytes) -> ReadAnswer | None:
        """What a whole answer says; None for what is none of this API, or more than is looked into."""
        if len(body) > LARGEST:
            return None
        try:
            if shape.unwieldy(body) and shape.unwieldy(body := self.lighter(body)):
                return None
            response = orjson.loads(body)
            return self.read(response, before) if isinstance(response, dict) else None
        except ValueError:
            return None
        except Exception:  # it is read from a copy: whatever it holds, its caller has it
            logger.exception("an answer of %s cannot be read", self.dialect.name)
            return None

    def lighter(self, body: bytes) -> bytes:
        """An answer of too many values without those that nobody reads. Raises ValueError for what is no text."""
        return body

    def read(self, response: Mapping[str, Json], before: bytes) -> ReadAnswer | None:
        """What a response says; None for what is none of this API."""
        if self._writer(response) is not self.dialect:
            return None
        return ReadAnswer(self.answer_in(response), before, response.get(self.told_in))

    def whole(self, events: ReplyEvents, before: bytes) -> tuple[bytes, ReadAnswer | None]:
        """The response that a stream amounts to, and what it says; None for what is none of this API."""
        try:
            response = events.response()
            return orjson.dumps(response), self.read(response, before)
        except Exception:  # as in `answer`
            logger.exception("a stream of %s cannot be put together", self.dialect.name)
            return orjson.dumps(NO_ANSWER), None


def single(id: str, message: Message, finish: str | None, usage: tuple[int, int, int]) -> WholeAnswer:
    """An answer of one choice."""
    return WholeAnswer(id, [AnswerChoice(0, message, finish)], usage)
