"""Two machines follow the keys of a real log: one that has no such topic yet, and revocations."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from millrace.infra.config import Settings
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.infra.log.topics import TopicSizes
from millrace.infra.principals.book import act_record, outgoing
from millrace.infra.principals.watch import PrincipalWatch, read_book
from millrace.schemas.ids import now_micros
from tests.infra.principals.test_book import IDS, PEPPER, grant, key_of

PATIENCE_S = 60.0


def waits(holds: Callable[[], bool]) -> float:
    """Milliseconds until it holds."""
    begun = time.monotonic()
    while not holds():
        assert time.monotonic() - begun < PATIENCE_S
        time.sleep(0.005)
    return 1000 * (time.monotonic() - begun)


def test_a_revocation_reaches_who_follows(broker: str, tmp_path: Path) -> None:
    namespace = "principals-watch"
    settings = Settings.model_validate({"namespace": namespace, "home": tmp_path, "gateway": {"pepper": PEPPER}})
    specs = [one for one in TopicSizes(namespace, "p").specs() if one.name.endswith(".principals")]
    with KafkaBus(broker, prefix=f"{namespace}.") as bus:
        watches = [PrincipalWatch(bus, settings, f"gateway-{n}") for n in range(2)]
        for watch in watches:
            watch.start()
        assert all(watch.ready.wait(PATIENCE_S) for watch in watches)
        assert not any(watch.asks_for_keys for watch in watches)
        bus.ensure_topics(specs)
        delays = []
        with bus.publisher() as publisher:
            for id in IDS:
                publisher.publish(outgoing(specs[0].name, grant(key_of(id), id, now_micros()))).result(30)
                waits(lambda id=id: all(one.verify(key_of(id)).standing == "live" for one in watches))  # type: ignore[misc]
                publisher.publish(outgoing(specs[0].name, act_record("revoke", id, now_micros(), "test"))).result(30)
                delays.append(waits(lambda id=id: all(one.verify(key_of(id)).standing == "revoked" for one in watches)))  # type: ignore[misc]
        print(f"known to both after at most {max(delays):.0f} ms, of {len(delays)} revocations")
        for watch in watches:
            watch.close()
        book = read_book(bus, namespace)
        assert [one["id"] for one in book.grants] == list(IDS)
        assert all(book.last_use(id) is not None and book.standing(id, now_micros()) == "revoked" for id in IDS)
