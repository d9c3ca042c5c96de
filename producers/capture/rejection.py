"""What the log (Kafka) refuses as such, however often it is sent: a small event in its place, so that the rest goes on.

Invariants: which entries are replaced is on the disk before a replacement is sent, and the replacement follows from the
entry and that note alone: so a number never carries two contents, whoever is killed when. It keeps the entry's number,
its step and its link to the event before, and tells of the rest no more than kind, size and digest."""

from __future__ import annotations

import hashlib
import logging
from contextlib import suppress
from typing import NamedTuple

import msgspec

from millrace.infra import durable, telemetry
from millrace.infra.stages.letters import made_id
from millrace.producers.capture.entry import Entry, StoredEntry
from millrace.producers.capture.log import CaptureLog
from millrace.schemas import codec, envelope
from millrace.schemas.errors import SchemaError

logger = logging.getLogger(__name__)

FILE = "refused.json"
NUMBER_HEADERS = ("source", "source-seq")
ROUTE_HEADERS = ("policy", "group", "trajectory", *NUMBER_HEADERS)
_refusals = telemetry.counter("millrace.gateway.refused_events", "{event}", "captured events that the log refuses")


class Note(NamedTuple):
    """An entry that is replaced: its number, the digest of its value, and the kind of error that the log gave."""

    seq: int
    digest: str
    error: str


class RefusedEntries:
    """The entries of one capture log that are replaced."""

    def __init__(self, log: CaptureLog) -> None:
        self._log = log
        self._path = log.folder / FILE
        notes: list[Note] = []
        with suppress(FileNotFoundError, msgspec.MsgspecError):  # what a power cut left no note in is refused again
            notes = msgspec.json.decode(self._path.read_bytes(), type=list[Note])
        self._notes = {note.seq: note for note in notes}

    def __contains__(self, item: StoredEntry) -> bool:
        note = self._notes.get(item.seq)
        # A number is given again, under another name of the source, where a power cut took the entry that it was of.
        return note is not None and note.digest == _digest(item.entry)

    def add(self, item: StoredEntry, error: Exception) -> None:
        """From now on this entry is replaced. Raises OSError, and then it is not."""
        note = Note(item.seq, _digest(item.entry), type(error).__name__)
        waiting = {seq: earlier for seq, earlier in self._notes.items() if seq >= self._log.acked}
        notes = waiting | {item.seq: note}
        durable.write(self._path, msgspec.json.encode(list(notes.values())), sync=self._log.fsync)
        self._notes = notes
        _refusals.add(1, error=note.error)
        logger.error(
            "the log refuses entry %d of %s for good (%s); a gap is sent in its place: %s",
            item.seq,
            self._log.folder,
            note.error,
            error,
        )

    def sent_for(self, item: StoredEntry) -> Entry:
        """What is sent for an entry: itself, or what takes its place."""
        return _gap(item.entry, self._notes[item.seq].error) if item in self else item.entry


def _gap(entry: Entry, error: str) -> Entry:
    """A gap in the place of an event; nothing at all, which refine answers with a dead letter, in that of what is no
    event."""
    source_headers = entry.headers
    try:
        event = codec.decode_as("Event", entry.value)
    except SchemaError:
        return Entry(entry.key, {name: source_headers[name] for name in NUMBER_HEADERS if name in source_headers}, b"")
    summary = f"{event['kind']} of {len(entry.value)} bytes, sha256 {_digest(entry)}"
    event |= {
        "id": made_id("refused", source_headers.get("source"), source_headers.get("source-seq"), event["id"]),
        "kind": "gap",
        "actor": "gateway",
        "parent_event": None,
        "body_encoding": "plain",
        "body": codec.encode_body("gap", {"missed": 1, "reason": f"refused by the log ({error}): {summary}"}),
    }
    event = envelope.link(event)
    headers = {"id": event["id"], "kind": "gap"} | {
        name: source_headers[name] for name in ROUTE_HEADERS if name in source_headers
    }
    return Entry(entry.key, headers, codec.encode("Event", event))


def _digest(entry: Entry) -> str:
    return hashlib.sha256(entry.value).hexdigest()
