"""What stands between a conversation that passes and the spool: every shell feeds its copy of the bytes here.

Invariants: nothing here raises, whatever passes and whatever the disk does: what cannot be read or kept is counted and
said, and the conversation goes on; what one side is fed is in the spool when `feed` returns."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial

from millrace.producers.intake import jsonrpc
from millrace.producers.intake.conversation import ChildEvent, ConversationFold, Event, Owner
from millrace.producers.intake.jsonrpc import EventCutter, Lines, TooLong
from millrace.producers.intake.sender import ReportSender
from millrace.producers.intake.spool import Spool
from millrace.schemas.ids import now_micros
from millrace.schemas.records import ToolStatus

logger = logging.getLogger(__name__)

UNREAD = "messages that passed could not be read"
LOSS = "captured events are lost: the spool is full or cannot be written"
SAY_AT = (1, 10, 100, 1000, 10_000, 100_000, 1_000_000)
"""counts at which a loss is said again"""
Tell = Callable[[str], None]


class Capture:
    """The spool of one process and the thread that sends it. `tell` hears what is lost."""

    def __init__(self, spool: Spool, tell: Tell) -> None:
        self._spool = spool
        self._tell = tell
        self._sender = ReportSender(spool, tell)
        self._turn = threading.Lock()
        self.unread = 0
        self._sender.start()

    @property
    def refused(self) -> int:
        """Events that the gateway will never take."""
        return self._sender.refused

    def side(self, owner: Owner, conversation: ConversationFold, cutter: Lines | EventCutter, *, client: bool) -> Side:
        """One direction of a conversation: what the client says, or what the server says."""
        return Side(self, owner, conversation, cutter, client)

    def take(self, owner: Owner, events: Callable[[], Iterable[Event | ChildEvent]]) -> None:
        """Keep events of a conversation. Never raises."""
        try:
            with self._turn:
                for item in events():
                    of, event = item if isinstance(item, ChildEvent) else (owner, item)
                    if not self._spool.put(event, of.key, of.base_url):
                        self._count(self._spool.lost, LOSS)
        except Exception:  # serving goes on, whatever capture meets
            logger.exception("a message could not be captured")
            self.passed_unread()

    def passed_unread(self) -> None:
        """A message passed that nobody could read."""
        self.unread += 1
        self._count(self.unread, UNREAD)

    def close(self, patience_s: float) -> None:
        """Send what waits, for so long at most, and say what was lost. Never raises."""
        try:
            self._sender.close(patience_s)
        except OSError as error:
            self._tell(f"the spool cannot be closed: {error}")
        for count, note in ((self.unread, UNREAD), (self._spool.lost, LOSS)):
            if count and count not in SAY_AT:
                self._tell(f"{count} {note}")

    def _count(self, count: int, note: str) -> None:
        if count in SAY_AT:
            self._tell(f"{count} {note}")


class Side:
    """Bytes of one direction."""

    def __init__(
        self, capture: Capture, owner: Owner, conversation: ConversationFold, cutter: Lines | EventCutter, client: bool
    ) -> None:
        self._capture = capture
        self._owner = owner
        self._conversation = conversation
        self._cutter = cutter
        self._client = client
        self.traceparent: str | None = None
        """trace context that came beside the messages"""
        self.keeps_ids = False
        self.ids: list[Hashable | None] = []
        """ids of the messages that passed, where they are kept"""

    def feed(self, data: bytes) -> None:
        """These bytes are about to be passed on. Never raises."""
        self._read(self._cutter.feed(data))

    def end(self) -> None:
        """No more come. Never raises."""
        self._read(self._cutter.end())

    def break_off(self, ids: list[Hashable | None], status: ToolStatus, why: str) -> None:
        """No answer comes to these requests. Never raises."""
        self._capture.take(self._owner, lambda: self._conversation.broken_off(ids, status, why, now_micros()))

    def _read(self, pieces: Iterator[bytes | TooLong]) -> None:
        for piece in pieces:
            try:
                if isinstance(piece, TooLong):
                    raise ValueError(f"a message of {piece} bytes")
                messages = jsonrpc.messages(piece)
            except ValueError as error:
                logger.debug("unread: %s", error)
                self._capture.passed_unread()
                continue
            for message in messages:
                if self.keeps_ids:
                    self.ids.append(jsonrpc.id_of(message))
                self._capture.take(self._owner, partial(self._events, message))

    def _events(self, message: jsonrpc.Message) -> Iterator[Event | ChildEvent]:
        now = now_micros()
        if self._client:
            return self._conversation.from_client(message, now, self.traceparent)
        return self._conversation.from_server(message, now)
