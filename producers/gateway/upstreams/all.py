"""The reader of every API that calls of an upstream are captured in."""

from __future__ import annotations

from collections.abc import Mapping

from millrace.producers.gateway.upstreams.chat import ChatReader
from millrace.producers.gateway.upstreams.messages import MessagesReader
from millrace.producers.gateway.upstreams.reader import Reader
from millrace.producers.gateway.upstreams.responses import ResponsesReader

READERS: Mapping[str, Reader] = {
    reader.dialect.name: reader for reader in (ChatReader(), MessagesReader(), ResponsesReader())
}
"""by the name of the dialect"""
