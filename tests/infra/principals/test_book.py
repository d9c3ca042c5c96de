"""Who a key is, whatever the order of its records and whatever the log has compacted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.infra.principals.book import LIVE_KEYS, PrincipalBook, act_record, mac_of, new_key, outgoing, pepper_name
from millrace.schemas.records import Principal

PEPPER, OTHER = "p" * 32, "q" * 32
NOW = 1_000
IDS = ("mk_a00000000000", "mk_b00000000000", "mk_c00000000000", "mk_d00000000000")


def grant(key: str, client: str = "bot", time: int = 0, **fields: Any) -> Principal:
    out: Any = act_record("grant", key[:15], time, "test")
    out |= {"client": client, "tenant": "acme", "roles": ["agent"], "mac": mac_of(PEPPER, key)}
    return out | {"pepper": pepper_name(PEPPER)} | fields  # type: ignore[no-any-return]


def key_of(id: str) -> str:
    return f"{id}_{'0' * 64}"


def book_of(records: list[Principal]) -> PrincipalBook:
    book = PrincipalBook()
    for record in records:
        book.fold(record)
    return book


def seen(book: PrincipalBook) -> list[Any]:
    times = range(0, 60, 7)
    ways = [(book.standing(id, at), book.last_use(id), book.revocation(id)) for id in IDS for at in times]
    live = [[one["id"] for one in book.live(client, at)] for client in ("bot", "cat") for at in times]
    return [ways, live, book.grants]


@st.composite
def histories(draw: st.DrawFn) -> list[Principal]:
    records: list[Principal] = []
    for _ in range(draw(st.integers(0, 14))):
        id, at = draw(st.sampled_from(IDS)), draw(st.integers(0, 40))
        match draw(st.sampled_from(["grant", "grant", "revoke", "use"])):
            case "grant":
                client, ends = draw(st.sampled_from(["bot", "cat"])), draw(st.none() | st.integers(0, 50))
                records.append(
                    grant(key_of(id), client, at, expires=ends, not_before=draw(st.none() | st.integers(0, 50)))
                )
            case "revoke":
                records.append(act_record("revoke", id, at, "test"))
            case _:
                records.append(act_record("use", id, at, "test"))
    return records


def compacted(records: list[Principal], upto: int) -> list[Principal]:
    """What a broker leaves that has compacted a first part: of each key the newest of that part."""
    newest = {outgoing("t", record).key: at for at, record in enumerate(records[:upto])}
    return [record for at, record in enumerate(records) if at >= upto or newest[outgoing("t", record).key] == at]


@given(histories(), st.data())
def test_a_compacted_log_says_what_the_whole_one_says(records: list[Principal], data: st.DataObject) -> None:
    upto = data.draw(st.integers(0, len(records)))
    assert seen(book_of(compacted(records, upto))) == seen(book_of(records))


@given(histories(), st.data())
def test_duplicates_and_another_order_of_acts_change_nothing(records: list[Principal], data: st.DataObject) -> None:
    places = data.draw(st.permutations(range(len(records))))
    keys = [outgoing("t", record).key for record in records]
    by_key = {key: iter([at for at in range(len(records)) if keys[at] == key]) for key in keys}
    mixed = [records[next(by_key[keys[at]])] for at in places]  # of one key in order, as in a partition
    assert seen(book_of([record for record in mixed for _ in range(2)])) == seen(book_of(records))


@given(histories(), st.sampled_from(IDS), st.data())
def test_a_revocation_is_final(records: list[Principal], id: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(records)))
    book = book_of([*records[:at], act_record("revoke", id, NOW, "test"), *records[at:]])
    assert book.standing(id, NOW) in ("revoked", "unknown")


@given(histories(), st.integers(0, 60))
def test_a_client_has_two_live_keys_at_most_and_a_later_one_cuts_nobody_off(records: list[Principal], at: int) -> None:
    book = book_of(records)
    for client in ("bot", "cat"):
        before = {one["id"] for one in book.live(client, at)}
        standing = {one["id"] for one in book.grants if book.standing(one["id"], at) in ("live", "early")}
        assert before <= standing
        assert len(before) <= LIVE_KEYS
        book.fold(grant("mk_z00000000000_" + "0" * 64, client, 100))
        assert before <= {one["id"] for one in book.live(client, at)}


def test_why_a_key_is_refused_is_told_to_its_holder_alone() -> None:
    records = [grant(key_of(id), f"client {id}") for id in IDS]
    records[1] |= {"expires": NOW}
    records[2] |= {"not_before": NOW + 1}
    book = book_of([*records, act_record("revoke", IDS[3], 0, "test")])
    for id, standing in zip(IDS, ("live", "expired", "early", "revoked"), strict=True):
        assert book.verify(key_of(id), PEPPER, NOW).standing == standing
        assert book.verify(f"{id}_{'1' * 64}", PEPPER, NOW) == ("unknown", None)
        assert book.verify(key_of(id), OTHER, NOW).standing == "foreign"
        assert book.verify(key_of(id), "", NOW).standing == "foreign"
    assert book.verify("sk-other", PEPPER, NOW).standing == "unknown"
    assert book.foreign_ids(PEPPER, NOW) == []
    assert set(book.foreign_ids("", NOW)) == {IDS[0], IDS[2]}


def test_the_third_key_waits_for_one_of_the_two_before_it() -> None:
    records = [grant(key_of(id), time=at) for at, id in enumerate(IDS[:3])]
    book = book_of(records)
    assert [book.standing(id, NOW) for id in IDS[:3]] == ["live", "live", "surplus"]
    book.fold(act_record("revoke", IDS[0], 5, "test"))
    assert [book.standing(id, NOW) for id in IDS[:3]] == ["revoked", "live", "live"]


@pytest.mark.parametrize("_", range(3))
def test_a_new_key_bears_its_id(_: int) -> None:
    id, key = new_key()
    book = book_of([grant(key)])
    assert key.startswith(f"{id}_")
    assert book.verify(key, PEPPER, NOW).standing == "live"
