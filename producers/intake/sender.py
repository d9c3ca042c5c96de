"""Sends what was captured to the gateway, in order, from a thread of its own.

Invariants: an event is let go of once the gateway answered for it, or refused it for good (its session has ended, or
the gateway cannot take it), which is counted and said; anything else is tried again until it is answered. A report goes
out under the numbers of its log, so trying again doubles nothing."""

from __future__ import annotations

import http.client
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import groupby
from urllib.parse import urlsplit

from millrace.producers.capture.cursor import CaptureCursor
from millrace.producers.capture.entry import StoredEntry
from millrace.producers.capture.log import CaptureLog
from millrace.producers.intake.spool import ENDS, LARGEST, Spool, is_outdated, remove
from millrace.producers.session_keys import session_id

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0
BACKOFF_S = (0.05, 5.0)
LOOK_S = 30.0
"""between looks for what ended processes left"""
REFUSAL_CODES = {
    "session_not_found",
    "session_ended",
    "session_expired",
    "wrong_session",
    "not_granted",
    "invalid_api_key",
}
"""codes of a gateway that will never take an event of this session"""
OVER = {"session_not_found", "session_ended", "session_expired"}
"""those of them that say what an end asks for"""
AT_ONCE = 32
"""events that are held in memory"""
UNFIT = {400, 413}
Tell = Callable[[str], None]


class NoAnswer(Exception):
    """The gateway has not answered for a report."""


class ReportSender:
    """Runs from `start` to `close`. `tell` hears, in words, what is lost and what is waited for."""

    def __init__(self, spool: Spool, tell: Tell) -> None:
        self.spool = spool
        self.refused = 0
        """events that the gateway will never take"""
        self._tell = tell
        self._lines: dict[str, http.client.HTTPConnection] = {}
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._deadline = 0.0
        self._trouble = ""
        self._look = time.monotonic()
        """when to look next for what ended processes left"""
        self._thread = threading.Thread(target=self._run, name="intake-sender", daemon=True)
        spool.log.on_append = self._wake.set

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self, patience_s: float) -> None:
        """Send what waits, for so long at most; what does not go stays for the next process."""
        self._deadline = time.monotonic() + patience_s
        self._closing.set()
        self._wake.set()
        self._thread.join(patience_s)
        if not self._thread.is_alive():
            self.spool.close()

    def _run(self) -> None:
        try:
            self._send_on()
        finally:
            for line in self._lines.values():
                line.close()

    def _send_on(self) -> None:
        cursor = self.spool.log.cursor(0)
        pause = BACKOFF_S[0]
        while True:
            self._wake.clear()
            ending = self._closing.is_set()
            try:
                self._drain(self.spool.log, cursor)
                pause = BACKOFF_S[0]
                if ending:
                    cursor.close()
                    return
                if time.monotonic() >= self._look:
                    self._look = time.monotonic() + LOOK_S
                    self.spool.log.forget(LOOK_S)
                    self._adopt()
                self._wake.wait(LOOK_S)
            except Exception as error:  # whatever it meets, what waits is tried again as long as this process lives
                if not isinstance(error, NoAnswer):
                    logger.exception("what was captured could not be sent")
                self._complain(str(error))
                cursor.close()
                if ending and time.monotonic() + pause > self._deadline:
                    return
                self._closing.wait(pause)
                if ending:
                    time.sleep(pause)
                pause = min(2 * pause, BACKOFF_S[1])
                cursor = self.spool.log.cursor(self.spool.log.acked)
                self._give_up()

    def _complain(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            self._tell(f"{trouble}; serving goes on, and what is captured waits in {self.spool.log.folder}")

    def _adopt(self) -> None:
        """Send what ended processes left, one after the other. Raises Unanswered."""
        for log in self.spool.left_behind():
            try:
                if not self._gave_up(log):
                    with closing(log.cursor(log.acked)) as cursor:
                        self._drain(log, cursor)
            except NoAnswer:
                log.close()
                continue
            remove(log)

    def _give_up(self) -> None:
        """Delete what ended processes left for too long, also while no gateway answers."""
        if time.monotonic() < self._look:
            return
        self._look = time.monotonic() + LOOK_S
        with suppress(OSError):  # looked at again
            for log in self.spool.left_behind():
                remove(log) if self._gave_up(log) else log.close()

    def _gave_up(self, log: CaptureLog) -> bool:
        is_old = is_outdated(log)
        if is_old:
            self._lose(log.end - log.acked, f"{log.folder} is older than a day")
        return is_old

    def _drain(self, log: CaptureLog, cursor: CaptureCursor) -> None:
        """Send everything of a log. Raises Unanswered."""
        skip_count = cursor.skipped
        while items := cursor.take(AT_ONCE):
            for report in reports(items):
                self._send(report)
                log.release(report[-1].seq + 1, sum(item.size for item in report))
        if cursor.skipped > skip_count:
            self._lose(cursor.skipped - skip_count, f"{log.folder} is damaged")

    def _send(self, report: Sequence[StoredEntry]) -> None:
        status, code, message = self._post(report)
        if status < 300 or (code in OVER and ENDS in report[0].entry.headers):
            self._trouble = ""
        elif status in UNFIT and len(report) > 1:
            for item in report:
                self._send([item])
        elif code in REFUSAL_CODES or status in UNFIT:
            self._lose(len(report), f"the gateway refused them: {message}")
        else:
            raise NoAnswer(f"{_url(report)} answered {status}: {message or 'is it a gateway?'}")

    def _lose(self, count: int, why: str) -> None:
        if count:
            self.refused += count
            self._tell(f"{count} captured events are lost: {why}")

    def _post(self, report: Sequence[StoredEntry]) -> tuple[int, str, str]:
        """(status, code, message) of the gateway's answer. Raises Unanswered."""
        url, entry = _url(report), report[0].entry
        headers = {"content-type": "application/json", "authorization": f"Bearer {entry.key}"}
        ends = ENDS in entry.headers
        path = f"{urlsplit(url).path}/sessions/{session_id(entry.key)}/{'end' if ends else 'events'}"
        fresh = url not in self._lines
        try:
            line = self._lines.setdefault(url, _line(url))
            line.request("POST", path, entry.value if ends else body_of(report), headers)
            answer = line.getresponse()
            status, content = answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._lines.pop(url).close()
            if not fresh:  # kept open from before, and closed by the other side meanwhile
                return self._post(report)
            raise NoAnswer(f"{url} does not answer ({type(error).__name__}: {error})") from error
        return status, *_error(content)


def reports(items: Sequence[StoredEntry]) -> Iterator[list[StoredEntry]]:
    """Entries in their order, in reports of one source, session and gateway each that a gateway takes; the end of a
    session alone."""
    for _, group in groupby(items, lambda item: (item.entry.key, item.entry.headers)):
        report: list[StoredEntry] = []
        size = 0
        for item in group:
            if report and (size + item.size > LARGEST or ENDS in item.entry.headers):
                yield report
                report, size = [], 0
            report.append(item)
            size += item.size + 32  # its number, as text
        yield report


def body_of(report: Sequence[StoredEntry]) -> bytes:
    """The body of `POST /v1/sessions/{id}/events`."""
    events = b",".join(b'{"seq":%d,' % item.seq + item.entry.value[1:] for item in report)
    return b'{"source":%s,"events":[%s]}' % (json.dumps(report[0].entry.headers["source"]).encode(), events)


def _url(report: Sequence[StoredEntry]) -> str:
    return report[0].entry.headers["url"]


def _line(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=TIMEOUT_S)


def _error(content: bytes) -> tuple[str, str]:
    try:
        error = json.loads(content)["error"]
        return str(error.get("code")), str(error.get("message"))
    except (ValueError, LookupError, TypeError, AttributeError):
        return "", ""
