"""The fields of events and the headers of their records, by whoever makes them: those that are on record.

A digest is of links, so a schema that grows by a field with a default leaves it as it is. Bodies are apart: their
schemas may grow too."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from millrace.formats.episodes.event_bodies import BareEvent
from millrace.formats.episodes.sealer import Kin, Sealer, headers_of
from millrace.infra import proof
from millrace.infra.log.base import Record
from millrace.producers.capture.log import CaptureLog, LogIdentity
from millrace.producers.gateway.sessions import recorder
from millrace.producers.gateway.sessions.session import GatewaySession
from millrace.schemas import codec
from millrace.schemas.chain import START, event_hash
from millrace.schemas.records import Split
from millrace.streams.reward.judge import Evaluator, Judge
from millrace.streams.reward.pool import Verdict
from millrace.testing.events import Episode

ROUNDS = 200
Made = Iterable[tuple[bytes, Mapping[str, Any]]]


class Drawn:
    """Values that follow from a seed alone, in every release of Python: `random()` is one of two draws that never
    change."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def number(self, below: int) -> int:
        return int(self._random.random() * below)

    def text(self) -> str:
        return "".join("abc-ä漢é0123"[self.number(11)] for _ in range(self.number(9)))

    def some(self) -> str | None:
        return self.text() if self.number(2) else None

    def split(self) -> Split:
        return "train" if self.number(2) else "evaluation"


def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    times, ids = count(1_700_000_000_000_000), count()
    monkeypatch.setattr(recorder, "now_micros", lambda: next(times))
    monkeypatch.setattr(recorder, "new_id", lambda: f"id-{next(ids)}")
    log = CaptureLog(tmp_path, name="gateway")
    log.identity = LogIdentity("gateway-1", 3, "")
    for at in range(ROUNDS):
        say = Drawn(f"recorded {at}")
        writer = recorder.Recorder(log, say.text())
        start: Any = {"ticket": None}
        session = GatewaySession(
            say.text(), say.text(), say.text(), say.text(), say.text(), say.text(), say.split(), start, say.some()
        )
        session.spawn_call = say.some()
        for _ in range(2):
            body: Any = {"missed": say.number(9), "reason": say.text()}
            when, parent, other = say.number(2) * 7, say.some(), say.some()
            draft = writer.draft(session, "gap", body, actor="a", policy=other) if say.number(2) else None
            if draft is not None:
                draft.write()
            writer.record(
                session, "gap", body, actor=say.text(), event_time=when, parent_event=parent, draft=draft, policy=other
            )
    log_entries = [kept.entry for kept in log.read()]
    log.close()
    return [(entry.value, entry.headers) for entry in log_entries]


def imported(*_: Any) -> Made:
    for at in range(ROUNDS):
        say = Drawn(f"imported {at}")
        kin = Kin(say.text(), say.text(), say.text(), say.text(), say.some(), say.some())
        sealer = Sealer(say.text(), say.text(), kin, say.split(), say.some(), say.number(3), say.text().encode())
        for number in range(2):
            body: Any = {"missed": say.number(9), "reason": say.text()}
            bare = BareEvent("gap", body, say.text(), say.number(1 << 50), say.some())
            event = sealer.seal(bare, say.text(), say.text(), say.number(9), number)
            yield codec.encode("Event", event), headers_of(event, say.text(), say.text())
            yield codec.encode("Event", event), headers_of({**event, "kind": "reward"}, say.text(), say.text())


async def judged(*_: Any) -> Made:
    class Pool:
        """Knows its verdict."""

        async def judge(self, task: str, output: str, episode: dict[str, Any]) -> Verdict:
            return Verdict(0.5, {}, None, None, None)

    made: list[tuple[bytes, Mapping[str, Any]]] = []
    for at in range(ROUNDS):
        say = Drawn(f"judged {at}")
        episode = Episode(f"r{say.text()}", task='{"answer": "x"}', tenant=say.text(), split=say.split())
        episode.start()
        event = {**episode.end(output=say.text()), "trace_id": say.some()}
        who = Evaluator("verifier", say.text(), say.text(), say.some(), bool(say.number(2)))
        headers = {"kind": b"episode_ended"} | ({"traceparent": b"00-t"} if say.number(2) else {})
        record = Record("ns.events", 0, at, b"key", codec.encode("Event", event), headers, 0)
        out = await Judge(Pool(), who, "p", clock=lambda: 99, key=say.text())(record)
        assert out is not None
        assert out.value is not None
        made.append((out.value, out.headers))
    return made


def built(*_: Any) -> Made:
    for at in range(ROUNDS):
        say = Drawn(f"built {at}")
        episode = Episode(f"r{say.text()}", tenant=say.text(), split=say.split(), source=say.text())
        for event in (episode.start(), episode.reward(0.5), episode.end(output=say.text())):
            yield codec.encode("Event", event), {}


@pytest.mark.parametrize(
    ("make", "digest"),
    [
        (recorded, "dc2fedaaa31af782804736d075f533d0f1191859e1183226018bdbd0b07c4e75"),
        (imported, "ad98af7abd38440432eed7fcb3eaa54e105c33ba2637c185e3c24bad16a94942"),
        (judged, "789e45e671a4e48fe922e8ebeff6e9ccce153987856bb4cde7fb9f665649827d"),
        (built, "fa3ab8eee3ca29a57fa51f521d201105db8050330bbdbffb8eaf3071cfba68f4"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_an_event_says_what_it_always_said(
    make: Callable[..., Any], digest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(tmp_path, monkeypatch)
    found, events = hashlib.sha256(), 0
    for value, headers in await made if make is judged else made:
        event = codec.decode_as("Event", value)
        assert event["hash"] == event_hash(event["prev_hash"], event)
        found.update(event_hash(START, {**event, "prev_hash": START, "body": b""}))
        told = [(name, "" if name == proof.HEADER else str(said)) for name, said in headers.items()]
        found.update(repr(told).encode())  # in their order
        events += 1
    assert events >= ROUNDS
    assert found.hexdigest() == digest
