"""Subjects are found by their identifiers, however these are written, and nowhere else."""

from __future__ import annotations

import base64
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.infra.config import Governance, Tenant
from millrace.infra.errors import StorageError
from millrace.streams.refine.stage import Refine
from millrace.streams.refine.subjects import store
from millrace.streams.refine.subjects.registry import Registry
from millrace.testing.events import Episode
from tests.support.folding import Bench, of

SUBJECTS = {
    "s-1": ["Ana L\u00f3pez", "ana.lopez@example.org", "+49 30 901820", "C-20417"],
    "s-2": ["\u5f20\u4f1f", "Bj\u00f8rn \u00c5s", "O'Brien-Smith", "5551234567"],
    "s-3": ["\u041e\u043b\u044c\u0433\u0430 \u041f\u0435\u0442\u0440\u043e\u0432\u0430", "Stra\u00dfe 7"],
}
REGISTRY = Registry(SUBJECTS, "v")
IDENTIFIERS = [(subject, identifier) for subject, names in SUBJECTS.items() for identifier in names]


def mentions(text: str) -> list[tuple[str, set[str]]]:
    data = text.encode()
    return [(data[start:end].decode(), set(subjects)) for start, end, subjects in REGISTRY.mentions(data)]


@pytest.mark.parametrize(("subject", "identifier"), IDENTIFIERS)
@pytest.mark.parametrize(
    "place", ["{}", "with {}, who said", '{{"x": "{}"}}', "\u201c{}\u201d", "a_{}_b", "\u00e9 {} \u00e9"]
)
@pytest.mark.parametrize("form", [str, str.upper, str.lower, lambda text: unicodedata.normalize("NFD", text)])
def test_an_identifier_is_found_in_any_case_and_form(subject, identifier, place, form):
    (mention,) = mentions(place.format(form(identifier)))
    assert mention[1] == {subject}
    assert mention[0].strip("+\u201c\u201d") == form(identifier).strip("+")


@pytest.mark.parametrize("number", ["+49 30 901820", "4930901820", "+49 (30) 90-18-20", "call 17 4930901820 18:00"])
def test_a_number_is_found_however_it_is_written(number):
    assert [subjects for _, subjects in mentions(f"{number}.")] == [{"s-1"}]


@pytest.mark.parametrize(
    "text",
    ["Diana L\u00f3pez", "Ana L\u00f3pezzo", "C-204170", "15551234567", "5551234567890", "Bj\u00f8rn \u00c5sen", ""],
)
def test_an_identifier_inside_another_word_is_none(text):
    assert mentions(text) == []


def test_an_identifier_of_several_subjects_names_all_and_longer_ones_hide_none():
    registry = Registry({"a": ["Ana"], "b": ["Ana Maria", "Maria"], "c": ["Maria"]}, "v")
    found = registry.mentions(b"ana maria")
    assert {subject for mention in found for subject in mention.subjects} == {"a", "b", "c"}


@given(st.lists(st.one_of(st.text(st.characters(codec="utf-8")), st.sampled_from([name for _, name in IDENTIFIERS]))))
def test_every_identifier_that_stands_alone_is_found(parts):
    text = " | ".join(parts)
    found = {name for _, names in mentions(text) for name in names}
    assert found >= {subject for subject, name in IDENTIFIERS if name in parts}


@given(st.binary(max_size=200))
def test_no_text_is_no_error(data):
    assert all(0 <= start < end <= len(data) for start, end, _ in REGISTRY.mentions(data))


def test_a_sealed_file_names_nobody_and_opens_under_its_key_alone(tmp_path):
    key, path = store.key_in(tmp_path), tmp_path / "registries" / "acme"
    store.write(path, key, SUBJECTS)
    assert store.key_in(tmp_path) == key
    assert store.read(path, key) == SUBJECTS
    assert not [part for part in ("Ana", "s-1", "901820") if part.encode() in path.read_bytes()]
    assert path.stat().st_mode & 0o077 == 0
    for data, other in ((path.read_bytes(), bytes(32)), (path.read_bytes()[:-1], key), (b"", key)):
        path.write_bytes(data)
        with pytest.raises(StorageError, match="sealed under another key"):
            store.read(path, other)
    with pytest.raises(StorageError, match="cannot be read"):
        store.read(tmp_path / "none", key)


def test_a_registry_is_read_anew_when_its_file_changes_and_stays_when_it_goes(tmp_path):
    rules = Governance(tenants={"acme": Tenant(identifiers="acme.registry")})
    key, path = store.key_in(tmp_path), tmp_path / "acme.registry"
    with pytest.raises(StorageError):
        store.registries_of(rules, tmp_path)
    store.write(path, key, {"a": ["Ana"]})
    registries = store.registries_of(rules, tmp_path)
    first = registries.of("acme")
    assert registries.of("acme") is first
    assert registries.of("other") is None
    store.write(path, key, {"a": ["Ana"], "b": ["Bob"]})
    second = registries.of("acme")
    assert second.mentions(b"bob")
    assert not first.mentions(b"bob")
    assert second.version != first.version
    path.unlink()
    assert registries.of("acme") is second
    assert store.registries_of(Governance(), tmp_path) is None


@pytest.mark.parametrize("form", [str, lambda text: base64.b64encode(f"to {text}".encode()).decode()])
def test_refine_takes_out_what_a_tenants_registry_knows(tmp_path, form):
    store.write(tmp_path / "r", store.key_in(tmp_path), SUBJECTS)
    episode = Episode("e")
    rules = Governance(tenants={"local": Tenant(identifiers="r"), "acme": Tenant()})
    stage = Refine(rules, [], slots=1, registries=store.registries_of(rules, tmp_path))
    body = {"call_id": "c", "name": "sh", "status": "ok", "tool_version": None, "latency_us": 1}
    name = form("ana l\u00f3pez")
    body["content"] = f"I asked {name} about it"
    (event,) = of(
        Bench(stage, clock=1).record("raw", episode.key, "Event", episode.event("tool_result", body)), "Event"
    )
    assert b"[REDACTED:subject] about it" in event["body"]
    assert event["governance"]["counts"] == {"subject": 1}
    assert event["governance"]["redaction_version"].rpartition("+")[2].startswith("identifiers-")
