"""Chat completions of an upstream, in the shapes that servers give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace.producers.gateway.answers import WholeAnswer, understood
from millrace.producers.gateway.protocols.all import CHAT
from millrace.producers.gateway.upstreams.assembled import Assembled
from millrace.producers.gateway.upstreams.events import Events
from millrace.producers.gateway.upstreams.reader import Reader


class ChatReader(Reader):
    """`POST /chat/completions`."""

    dialect = CHAT
    path = "/chat/completions"

    def understood(self, found: Mapping[str, Any]) -> WholeAnswer:
        return understood(found)

    def assembled(self) -> Events:
        return Assembled()
