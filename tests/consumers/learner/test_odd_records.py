"""Whatever lies in a policy's topics, the learner's view of the log goes on, and the order has no hole."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from millrace.consumers.learner.step.next_work import PlacedGroup
from millrace.consumers.learner.step.reading import NO_PLACES, REASONS, read
from millrace.consumers.learner.version.collect import choose
from millrace.consumers.learner.version.log import PolicyLog
from millrace.infra.log.base import Outgoing, Place
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.history.places import GONE, LostRecord, PlaceReader
from millrace.infra.log.memory.bus import MemoryBus
from millrace.schemas import codec
from tests.support.odd import records
from tests.support.players import Plan, version_zero

TOPICS = {name: f"n.p.{name}" for name in ("weights", "ledger", "trajectories", "resolutions", "completions")}


def begun() -> tuple[MemoryBus, PolicyLog]:
    bus = MemoryBus(dict.fromkeys(TOPICS.values(), 1))
    plan = Plan(None, 2, 1, 1, 1, "reserve", 0.0, "drop")  # type: ignore[arg-type]
    put(bus, "weights", codec.encode("WeightVersion", version_zero(plan)[0]))
    return bus, PolicyLog(bus, TOPICS, "reserve")


def put(bus: MemoryBus, name: str, value: bytes, **headers: str) -> None:
    head = {key: text.encode() for key, text in headers.items()}
    with bus.publisher() as publisher:
        publisher.publish(Outgoing(TOPICS[name], b"k", value, head)).result()


def ready(seq: int, **over: Any) -> bytes:
    place = {"topic": TOPICS["trajectories"], "partition": 0, "offset": seq}
    row: dict[str, Any] = {"kind": "ready", "policy": "p", "ticket": seq, "seq": seq, "group": f"g{seq}"}
    row |= {"prompt_id": None, "solicited": True, "size": 1, "trajectories": [place], "tokens": [1], "rewards": [1.0]}
    row |= {"v_head": 0, "v_tail": 0, "min_version": 0, "deadline": 1, "reason": None, "setting": None, "time": 0}
    return codec.encode("Resolution", row | over)


@given(st.lists(st.one_of(records("Resolution"), records("Completion")), max_size=4))
def test_the_log_is_followed_past_any_record(odd: list[dict[str, Any]]) -> None:
    bus, log = begun()
    for record in odd:
        name = "Completion" if "samples" in record else "Resolution"
        # A ready group of dispatch's is a ready group, odd as it is: its seq is kept out of the way.
        fixed: dict[str, Any] = {"policy": "p"}
        if name == "Resolution" and record["seq"] in (0, 1):
            fixed["seq"] = None
        settled = record.get("kind") == "setting" and (record.get("setting") or {}).get("name") == "batch"
        if not settled:
            put(bus, f"{name.lower()}s", codec.encode(name, {**record, **fixed}))
    put(bus, "weights", b"no record")
    put(bus, "completions", b"\xc3\x01")
    for seq in (0, 1):
        put(bus, "resolutions", ready(seq))
    log.catch_up()
    log.all_digests(0)
    batch = log.order.next(0)
    assert batch is not None
    assert [group["group"] for group in batch.groups] == ["g0", "g1"]
    log.frontier.offsets(2)


def test_a_weight_event_that_the_ledger_does_not_name_takes_no_directory_away() -> None:
    bus, log = begun()
    first, entry = version_zero(Plan(None, 2, 1, 1, 1, "reserve", 0.0, "drop"))  # type: ignore[arg-type]
    digests = {0: first["digest"]} | {version: f"{version:064x}" for version in (1, 2, 3)}
    put(bus, "weights", codec.encode_by_name("WeightVersion", {**first, "version": 2, "digest": "e" * 64}))
    for version in (1, 2, 3):
        put(
            bus,
            "weights",
            codec.encode_by_name("WeightVersion", {**first, "version": version, "digest": digests[version]}),
        )
    for version, digest in digests.items():
        put(bus, "ledger", codec.encode_by_name("LedgerEntry", {**entry, "version": version, "digest": digest}))
    for odd in ({"version": 3, "digest": "f" * 64, "mode": "delta"}, {"version": 10**14}, {"version": -7}):
        put(bus, "weights", codec.encode_by_name("WeightVersion", {**first, **odd}))
    put(bus, "ledger", b"no record")
    committed = log.all_digests(3)
    assert committed == digests
    assert log.deltas(committed) == set()
    names = [f"v{version}-{digest[:12]}" for version, digest in digests.items()]
    assert choose(names, committed, keep=2, serving=set(), pins=set()) == [names[1]]


def test_a_ready_group_that_cannot_be_read_keeps_its_seq_and_is_lost() -> None:
    bus, log = begun()
    put(bus, "resolutions", b"torn", kind="ready", seq="0", group="g0", policy="p")
    elsewhere = {"topic": "n.other", "partition": 9, "offset": -4}
    put(bus, "resolutions", ready(1, trajectories=[elsewhere]))
    log.catch_up()
    batch = log.order.next(0)
    assert batch is not None
    assert [group["trajectories"] for group in batch.groups] == [[], []]
    share = read(reader(bus), [PlacedGroup(seq, "g", []) for seq in (0, 1)], vocabulary=10, longest=10)
    assert [REASONS[code] for code in share.losses.values()] == [NO_PLACES, NO_PLACES]


def test_a_seq_that_no_header_holds_is_passed_over() -> None:
    bus, log = begun()
    for seq in ("", "x", "-1", "9" * 40):
        put(bus, "resolutions", b"torn", kind="ready", seq=seq)
    log.catch_up()
    assert log.order.next(0) is None


def reader(bus: MemoryBus) -> PlaceReader:
    return PlaceReader(bus, ClaimStore("memory://odd"))


def test_places_that_cannot_be_are_lost() -> None:
    bus, _ = begun()
    places = [Place("n.nowhere", 0, 0), Place(TOPICS["trajectories"], 7, 0), Place(TOPICS["trajectories"], 0, -1)]
    found = reader(bus).trajectories(places)
    assert [isinstance(one, LostRecord) and one.reason for one in found] == [GONE] * 3
