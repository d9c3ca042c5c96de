"""Schemas may only change so that old bytes stay readable and old readers can read new bytes."""

from __future__ import annotations

import json

import pytest
from avro.compatibility import ReaderWriterCompatibilityChecker, SchemaCompatibilityType
from avro.schema import parse

from millrace.schemas import codec, generate, registry
from millrace.schemas.strict import check_of

PAST = sorted(registry.HISTORY.glob("*/*.avsc"))


def current_text(name: str) -> str:
    parsed = registry.current(name).definition
    return json.dumps({key: value for key, value in parsed.items() if not key.startswith("__")})


@pytest.mark.parametrize("path", PAST, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_each_schema_is_compatible_both_ways_with_its_history(path) -> None:
    past, today = parse(path.read_text()), parse(current_text(path.parent.name))
    checker = ReaderWriterCompatibilityChecker()
    for reader, writer in ((today, past), (past, today)):
        result = checker.get_compatibility(reader, writer)
        assert result.compatibility is SchemaCompatibilityType.compatible, result.messages


def test_an_incompatible_change_is_found() -> None:
    text = json.loads(current_text("Place"))
    text["fields"].append({"name": "added_without_default", "type": "string"})
    changed, today = parse(json.dumps(text)), parse(current_text("Place"))
    result = ReaderWriterCompatibilityChecker().get_compatibility(changed, today)
    assert result.compatibility is SchemaCompatibilityType.incompatible


def test_today_is_in_the_history_and_the_typed_records_are_fresh() -> None:
    for name in registry.names():
        schema = registry.current(name)
        assert (registry.HISTORY / name / f"{schema.fingerprint.hex()}.avsc").exists(), (
            "run python -m millrace.schemas.generate"
        )
    assert (registry.AVRO.parent / "records.py").read_text() == generate.source(), (
        "run python -m millrace.schemas.generate"
    )


def test_bytes_of_a_past_schema_decode_with_todays_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    today = registry.current("DeadLetter")
    text = json.loads(current_text("DeadLetter"))
    text["fields"] = [field for field in text["fields"] if field["name"] != "tenant"]
    past = registry.Schema("DeadLetter", registry.fingerprint_of(text), text, text)
    assert past.fingerprint != today.fingerprint
    record = {field["name"]: None for field in text["fields"]} | {"id": "1", "stage": "refine", "reason": "x"}
    record |= {"detail": "", "time": 1, "place": {"topic": "raw", "partition": 0, "offset": 1}}
    with monkeypatch.context() as patch:
        patch.setattr(codec, "_head", lambda name: (codec.MARK + past.fingerprint, past, check_of(text)))
        old = codec.encode("DeadLetter", record)
    monkeypatch.setattr(codec, "by_fingerprint", lambda data: past if data == past.fingerprint else today)
    assert codec.decode(old) == ("DeadLetter", record | {"tenant": None})
