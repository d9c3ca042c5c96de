"""The receiver: spans into its own log before they are answered, and what became of them into another.

Two logs, each of `millrace.producers.capture.log`. `spans` holds what was taken and which conversations are over, and
is never sent on; `events` holds what became of them, and the forwarder sends it to `raw`.

Invariants: what `take` returned for survives kill -9; a start folds `spans` again and appends only those events that
`events` lacks, by trajectory and step, so whoever is killed when, each event is there once; a conversation is over in
`spans` before any event of it is in `events`; a file of `spans` is deleted only when nothing open needs it and nothing
remembered does."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence

from millrace.formats.episodes.rows import BadRow
from millrace.formats.episodes.sealer import Sealer, headers_of
from millrace.formats.spans.otlp_json import Span
from millrace.infra import faults, telemetry
from millrace.producers.capture.entry import Entry
from millrace.producers.capture.log import CaptureLog, LogFull
from millrace.producers.intake.otlp.assembler import LONGEST, MEMORY, SECOND, Assembler
from millrace.producers.intake.otlp.conversation_events import EmittedEvent
from millrace.producers.intake.otlp.records import ClosedConversation, Record, Took, decode, encode
from millrace.schemas import codec
from millrace.schemas.chain import START
from millrace.schemas.ids import Micros, now_micros

logger = logging.getLogger(__name__)

KEPT_S = (2 * LONGEST + MEMORY) / SECOND + 3600
"""seconds for which a file of spans is kept after the last of it was written, also where raw content has fewer hours:
for as long as anything that is remembered may go back to"""
FORGET_S = 60.0
_events = telemetry.counter("millrace.otlp.events", "{event}", "events made of spans, by kind")
_omissions = telemetry.counter(
    "millrace.otlp.passed_over", "{span}", "spans that have no place in an episode, by reason"
)
_open = telemetry.gauge("millrace.otlp.open", "{trace}", "traces that are not over")


class OtlpReceiver:
    """The parts of one receiver. captured: whether the gateway made a reply with this id, and so has it in the log."""

    def __init__(
        self,
        spans: CaptureLog,
        events: CaptureLog,
        assembler: Assembler,
        *,
        reward_key: str = "",
        is_captured: Callable[[str], bool] = lambda id: False,
        clock: Callable[[], Micros] = now_micros,
    ) -> None:
        self.spans = spans
        self.events = events
        self.assembler = assembler
        self.trouble = ""
        """why events cannot be written now"""
        self._reward_key = reward_key
        self._is_captured = is_captured
        self._clock = clock
        self._turn = threading.Lock()
        self._sizes: deque[tuple[int, int]] = deque()
        """number and bytes of entries of `spans` that were not released"""
        self._pending: deque[EmittedEvent] = deque()
        self._chains: dict[str, tuple[int, bytes]] = {}
        """the next step of a trajectory and its last link"""
        self._counted: Counter[str] = Counter()
        self._forgot = 0
        self._rebuild()

    def take(self, tenant: str, spans: Sequence[Span]) -> None:
        """Spans that were judged. When it returns they survive kill -9. Raises LogFull, and then nothing was taken."""
        if not spans:
            return
        with self._turn:
            record = Took(tenant, self._clock(), spans)
            number = self._append(record)
            faults.point("otlp.taken")
            self._emit(self.assembler.took(record, number))
            self._count()

    def close_due(self, *, ends_all: bool = False) -> int:
        """End the conversations that are over, or all; returns how many. Raises nothing: what cannot be written now is
        written later."""
        with self._turn:
            now = self._clock()
            conversations = self.assembler.all_open(now) if ends_all else self.assembler.all_over(now)
            count = 0
            try:
                while self._flush() and count < len(conversations):
                    self._close(conversations[count])
                    count += 1
            except LogFull as error:
                self._in_trouble(error)
            self._release()
            self._count()
            return count

    def tend(self, forget_after_s: float = FORGET_S) -> None:
        """Delete files of spans that nothing needs, now and then."""
        with self._turn:
            now = self._clock()
            if now - self._forgot > forget_after_s * SECOND:
                self._forgot = now
                self.spans.forget(KEPT_S)

    def close(self) -> None:
        """Let go of both logs. Idempotent."""
        with self._turn:
            self.spans.close()
            self.events.close()

    # ------------------------------------------------------------------ inside

    def _rebuild(self) -> None:
        """Fold what is kept. What is before the released position was written out whole before it was released."""
        for item in self.events.read():
            headers = item.entry.headers
            if "_step" in headers:
                self._chains[headers["trajectory"]] = int(headers["_step"]) + 1, bytes.fromhex(headers["_link"])
        begin, position = self.spans.begin, self.spans.acked
        for item in self.spans.read():
            record = decode(item.entry.value)
            if item.seq >= position:
                self._sizes.append((item.seq, item.size))
            if isinstance(record, Took):
                events: Collection[EmittedEvent] = self.assembler.took(record, item.seq)
            elif record.since < begin:
                self.assembler.forget(record)
                continue
            else:
                events = self.assembler.close(record)
            self._pending.extend(one for one in events if item.seq >= position and not self._is_there(one))
        self._flush()
        self._release()
        self._counted = Counter(self.assembler.passed)

    def _is_there(self, one: EmittedEvent) -> bool:
        return one.step < self._chains.get(one.kin.id, (0, START))[0]

    def _close(self, conversation: ClosedConversation) -> None:
        replies = sorted(id for id in self.assembler.replies_of(conversation) if self._is_captured(id))
        record = ClosedConversation(
            conversation.tenant, conversation.at, conversation.traces, conversation.since, replies
        )
        self._append(record)
        faults.point("otlp.closed")
        self._emit(self.assembler.close(record))

    def _append(self, record: Record) -> int:
        before = self.spans.waiting
        number = self.spans.append(
            Entry(record.tenant, {}, encode(record)), from_reserve=isinstance(record, ClosedConversation)
        )
        self._sizes.append((number, self.spans.waiting - before))
        return number

    def _emit(self, events: Collection[EmittedEvent]) -> None:
        self._pending.extend(events)
        self._flush()

    def _flush(self) -> bool:
        """Write the events that wait; whether none does any more."""
        try:
            while self._pending:
                self._write(self._pending[0])
                self._pending.popleft()
                faults.point("otlp.written")
        except LogFull as error:
            self._in_trouble(error)
            return False
        self.trouble = ""
        return True

    def _write(self, one: EmittedEvent) -> None:
        step, link = self._chains.get(one.kin.id, (one.step, START))
        log, identity = self.events, self.events.identity
        sealer = Sealer(self.assembler.policy, one.tenant, one.kin, "train", one.trace, step, link)
        try:
            event = sealer.seal(one.draft, one.id, identity.source, identity.epoch, log.end)
        except BadRow as error:  # each span was made into events before it was taken
            logger.error("an event of trajectory %s cannot be written: %s", one.kin.id, error)
            return
        headers = headers_of(event, log.source, self._reward_key)
        headers |= {"_step": str(event["step"]), "_link": event["hash"].hex()}
        entry = Entry(f"{one.tenant}/{one.kin.group}", headers, codec.encode("Event", event))
        log.append(entry, from_reserve=event["kind"] == "episode_ended")
        self._chains[one.kin.id] = sealer.step, sealer.link
        _events.add(1, kind=event["kind"])

    def _in_trouble(self, error: LogFull) -> None:
        if not self.trouble:
            logger.error("conversations that are over wait: %s", error)
        self.trouble = str(error)

    def _release(self) -> None:
        """Note what nothing open needs any more, once all that became of it is written."""
        if self._pending:
            return
        since = self.assembler.since
        until = self.spans.end if since is None else since
        size = 0
        while self._sizes and self._sizes[0][0] < until:
            size += self._sizes.popleft()[1]
        if until > self.spans.acked:
            try:
                self.spans.release(until, size)
            except OSError as error:
                logger.warning("the position of %s cannot be written: %s", self.spans.folder, error)
        trajectories = self.assembler.trajectories
        if len(self._chains) > 2 * len(trajectories) + 1000:
            self._chains = {id: chain for id, chain in self._chains.items() if id in trajectories}

    def _count(self) -> None:
        for reason, count in (self.assembler.passed - self._counted).items():
            _omissions.add(count, reason=reason if reason in REASONS or ":" in reason else "other span")
        self._counted = Counter(self.assembler.passed)
        _open.set(self.assembler.open)


REASONS = frozenset(
    {
        "call in the log already",
        "call without messages",
        "conversation in the log already",
        "evaluation of an unknown reply",
        "evaluation without a score",
        "further choice of a call",
        "log record of no span",
        "second span of a call",
        "span that came again",
        "span without a trace",
    }
)
"""reasons that a metric tells apart"""
