from __future__ import annotations

from pathlib import Path

from millrace.infra.log.base import Outgoing, Place, TopicSpec
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.history.places import CLAIM, CORRUPT, GONE, LostRecord, PlaceReader
from millrace.infra.log.memory.bus import MemoryBus
from millrace.schemas import codec
from tests.support.feed import trajectory

TOPIC = "n.p.trajectories"


def test_places_come_back_in_order_and_what_is_lost_says_why(tmp_path: Path) -> None:
    bus, store = MemoryBus(), ClaimStore(str(tmp_path))
    bus.ensure_topics([TopicSpec(TOPIC, 2)])
    plain = codec.encode("Trajectory", trajectory("p", 1, 0, size=2))
    claimed = codec.encode("Trajectory", trajectory("p", 2, 0, size=2))
    claim = store.store("Trajectory", claimed)
    vanished = store.store("Trajectory", codec.encode("Trajectory", trajectory("p", 3, 0, size=2)))
    (tmp_path / vanished["sha256"][:2] / vanished["sha256"]).unlink()
    values = [plain, codec.encode("Claim", claim), codec.encode("Claim", vanished), b"\xc3\x01garbage", None]
    with bus.publisher() as publisher:
        written = [publisher.publish(Outgoing(TOPIC, b"k", v, partition=1)).result() for v in values]
    found = PlaceReader(bus, store).trajectories([written[1], written[0], *written[2:], Place(TOPIC, 0, 7)])
    assert [one["group"] for one in found[:2] if not isinstance(one, LostRecord)] == ["group-2", "group-1"]
    assert [one.reason for one in found[2:] if isinstance(one, LostRecord)] == [CLAIM, CORRUPT, GONE, GONE]


def test_nothing_asked_nothing_read(tmp_path: Path) -> None:
    assert PlaceReader(MemoryBus(), ClaimStore(str(tmp_path))).trajectories([]) == []
