"""Chat completions of an upstream, in the shapes that servers give them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from millrace.dialects import shape
from millrace.dialects.answers import WholeAnswer, understood
from millrace.dialects.reading.chat_assembler import AssembledStream
from millrace.dialects.reading.events import ReplyEvents
from millrace.dialects.reading.reader import DialectReader
from millrace.schemas import bounds
from millrace.schemas.json_values import Json


class ChatReader(DialectReader):
    """`POST /chat/completions`."""

    def understood(self, found: Mapping[str, Json]) -> WholeAnswer:
        return understood(found)

    def lighter(self, body: bytes) -> bytes:
        """Without log-probabilities, which are most of an answer's values where they were asked for."""
        if shape.measure(body).depth > bounds.DEPTH:
            return body
        try:
            members = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            choices = msgspec.json.decode(members.get("choices", b"[]"), type=list[dict[str, msgspec.Raw]])
        except msgspec.DecodeError:
            return body
        for choice in choices:
            choice.pop("logprobs", None)
        return msgspec.json.encode({**members, "choices": choices})

    def assembled(self) -> ReplyEvents:
        return AssembledStream()
