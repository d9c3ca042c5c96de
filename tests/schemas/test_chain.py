"""The chain's link depends on every field of an event and on nothing else; links of former releases still verify."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.schemas import codec
from millrace.schemas.chain import LONG, START, VERSION, begin, event_hash
from millrace.schemas.registry import HISTORY, current, parse_schema
from millrace.schemas.strict import check_of

FORMER = {"id": "e1", "kind": "model_call", "trajectory": "t1", "step": 3, "body": b"\x00body", "tenant": "acme"}
FIELDS = {field["name"]: field["type"] for field in current("Event").definition["fields"]}
NAMED: dict[str, Any] = {}


def _collect(kind: Any) -> None:
    if isinstance(kind, list):
        for each in kind:
            _collect(each)
    elif isinstance(kind, dict):
        if "name" in kind:
            NAMED[kind["name"]] = kind
        for inner in [field["type"] for field in kind.get("fields", ())] + [kind.get("items"), kind.get("values")]:
            _collect(inner)


_collect(current("Event").definition)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of an Avro type."""
    if isinstance(kind, list):
        return st.one_of([values(each) for each in kind])
    if isinstance(kind, dict) and kind["type"] == "array":
        return st.lists(values(kind["items"]), max_size=2)
    if isinstance(kind, dict) and kind["type"] == "map":
        return st.dictionaries(st.text(max_size=3), values(kind["values"]), max_size=2)
    named = kind["name"] if isinstance(kind, dict) and "name" in kind else kind
    if named in NAMED:
        found = NAMED[named]
        if found["type"] == "enum":
            return st.sampled_from(found["symbols"])
        return st.fixed_dictionaries({field["name"]: values(field["type"]) for field in found["fields"]})
    plain: dict[str, st.SearchStrategy[Any]] = {
        "null": st.none(),
        "string": st.text(max_size=4),
        "bytes": st.binary(max_size=4),
        "int": st.integers(-(2**31), 2**31 - 1),
        "long": st.integers(-(2**63), 2**63 - 1),
        "float": st.floats(width=32, allow_nan=False),
        "double": st.floats(allow_nan=False),
        "boolean": st.booleans(),
    }
    return plain[kind if isinstance(kind, str) else kind["type"]]


EVENTS = st.fixed_dictionaries({name: values(kind) for name, kind in FIELDS.items()}).map(
    lambda event: {**event, "hash_version": VERSION}
)


def holds(event: dict[str, Any]) -> bool:
    """Whether a reader of the log takes the event for what was linked."""
    return event_hash(event["prev_hash"], event) == event["hash"]


def linked(event: dict[str, Any]) -> dict[str, Any]:
    return {**event, "hash": event_hash(event["prev_hash"], event)}


@pytest.mark.parametrize("name", FIELDS)
@settings(max_examples=25)  # of each field, so that there are some hundred whole events in all
@given(data=st.data())
def test_no_field_of_an_event_can_be_altered_unseen(name: str, data: st.DataObject) -> None:
    event = linked(data.draw(EVENTS))
    assert holds(event)
    other = data.draw(values(FIELDS[name]).filter(lambda value: value != event[name]))
    assert not holds({**event, name: other})


@given(data=st.data())
def test_no_part_of_the_governance_can_be_altered_unseen(data: st.DataObject) -> None:
    governance = data.draw(values("millrace.Governance"))
    event = linked({**data.draw(EVENTS), "governance": governance})
    fields = {field["name"]: field["type"] for field in NAMED["millrace.Governance"]["fields"]}
    name = data.draw(st.sampled_from(sorted(fields)))
    other = data.draw(values(fields[name]).filter(lambda value: value != governance[name]))
    assert not holds({**event, "governance": {**governance, name: other}})


@given(EVENTS)
def test_a_link_survives_the_codec(event: dict[str, Any]) -> None:
    assert holds(codec.decode_as("Event", codec.encode("Event", linked(event))))


@given(EVENTS)
def test_what_is_no_field_of_an_event_does_not_matter(event: dict[str, Any]) -> None:
    assert event_hash(START, event | {"data": 1}) == event_hash(START, event)


def test_a_field_at_its_default_gives_the_link_of_a_schema_without_it() -> None:
    event = {"id": "e1", "hash_version": VERSION}
    assert event_hash(START, event) == event_hash(START, event | {"governance": None, "span_id": None})
    assert event_hash(START, event) != event_hash(START, event | {"span_id": ""})


LATER = (
    "step",
    "source_seq",
    "prev_hash",
    "id",
    "capture_time",
    "source_epoch",
    "event_time",
    "parent_event",
    "policy",
)
"""what an event may get only when it is appended, and fields on either side of the body"""


@given(event=EVENTS, fill=st.binary(min_size=1, max_size=3), more=st.integers(0, 3), data=st.data())
def test_a_link_that_was_begun_is_the_link(event: dict[str, Any], fill: bytes, more: int, data: st.DataObject) -> None:
    event["body"] = (fill * LONG)[: LONG + more]
    begun = begin(event)
    later = {name: data.draw(values(FIELDS[name])) for name in data.draw(st.sets(st.sampled_from(LATER)))}
    placed = {**event, **later}
    for _ in range(2):  # a begun link may be finished more than once
        assert event_hash(placed["prev_hash"], placed, begun) == event_hash(placed["prev_hash"], placed)


def test_a_link_that_began_with_other_fields_is_made_anew() -> None:
    event = {"id": "e1", "hash_version": VERSION, "actor": "a", "attempt": "t", "body": b"x" * LONG}
    for change in ({"actor": "b"}, {"attempt": "u"}, {"span_id": "one field more"}):
        assert event_hash(START, event | change, begin(event)) == event_hash(START, event | change)


def test_a_short_body_is_not_begun() -> None:
    with pytest.raises(ValueError, match="65535 bytes"):
        begin({"id": "e1", "hash_version": VERSION, "body": b"x" * (LONG - 1)})


# ---------------------------------------------------------------------- version 1


def test_the_former_link_is_a_known_value() -> None:
    assert event_hash(START, FORMER).hex() == "6bfa76379ac78018c62ff8d0e763b095d829f505ee724a4af3aefb7afd6f3646"
    assert event_hash(START, FORMER | {"hash_version": 1}) == event_hash(START, FORMER)


@pytest.mark.parametrize(
    "change",
    [{"id": "e2"}, {"kind": "gap"}, {"trajectory": "t2"}, {"step": 4}, {"body": b"\x00bodz"}, {"hash_version": 2}],
)
def test_every_part_that_version_1_covers_matters(change: dict[str, Any]) -> None:
    assert event_hash(START, FORMER | change) != event_hash(START, FORMER)
    assert event_hash(b"x", FORMER) != event_hash(START, FORMER)


def test_parts_cannot_be_shifted_into_each_other() -> None:
    assert event_hash(START, FORMER | {"id": "e1m", "kind": "odel_call"}) != event_hash(START, FORMER)


def test_an_event_of_a_former_release_still_verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes as the schema without `hash_version` wrote them."""
    (path,) = [path for path in HISTORY.glob("Event/*.avsc") if "hash_version" not in path.read_text()]
    past = parse_schema(json.loads(path.read_text()))
    assert isinstance(past, dict)
    plain = {"string": "x", "int": 1, "long": 1, "bytes": b"b"}
    event = {f["name"]: plain.get(f["type"]) if isinstance(f["type"], str) else None for f in past["fields"]}
    event |= {"kind": "gap", "split": "train", "body_encoding": "plain", "prev_hash": START}
    event["hash"] = event_hash(START, event)
    head = codec.MARK + bytes.fromhex(path.stem)
    with monkeypatch.context() as patch:
        patch.setattr(codec, "_head", lambda name: (head, codec.Schema("Event", head[2:], past, past), check_of(past)))
        data = codec.encode("Event", event)
    read = codec.decode_as("Event", data)
    assert read["hash_version"] == 1
    assert holds(read)
