"""docs/algorithms says what the code does."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from millrace.trainers.algorithms.knobs import Knobs
from millrace.trainers.algorithms.names import GONE, NEW_NAMES, SWITCHES, VALUES, translate
from millrace.trainers.algorithms.presets import PRESETS
from millrace.trainers.algorithms.registry import OTHERS, names, policy
from tests.trainers.algorithms.pages import CURVES, FAMILIES, INDEX, WRITTEN, block, knob_comments, modules, pages
from tests.trainers.algorithms.papers import SOURCES
from tests.trainers.algorithms.table import PAGES

FOLDER = Path(__file__).parents[3] / "docs" / "algorithms"
MADE = pages()


def test_the_pages_are_what_the_code_says() -> None:
    found = {path.name: path.read_text() for path in FOLDER.glob("*.md") if path.name not in WRITTEN}
    assert found == MADE, "run: python -m tests.trainers.algorithms.pages docs/algorithms"


def test_every_algorithm_has_a_page_a_curve_and_every_knob_a_meaning() -> None:
    for name in names():
        assert f"| [`{name}`]({name}.md) |" in MADE[INDEX]
        assert f"({CURVES}/{name}.svg)" in MADE[f"{name}.md"]
    assert {path.stem for path in (FOLDER / CURVES).iterdir()} == set(names())
    assert list(PAGES) == names()
    assert {page.family for page in PAGES.values()} == FAMILIES.keys()
    for kind in (Knobs, *(other.kind for other in OTHERS.values())):
        assert [name for _, name, _, _ in knob_comments(kind)] == [field.name for field in fields(kind)]


def test_a_page_begins_with_the_whole_objective() -> None:
    for name in names():
        equation = PAGES[name].equation
        first = re.search(r"```text\n(.+?)\n```", MADE[f"{name}.md"], re.DOTALL)
        assert first is not None
        assert first[1] == block(equation)
        assert max(map(len, first[1].splitlines())) <= 120
        for line in equation:
            for knob in line.knobs:
                assert re.search(rf"^\| `{re.escape(line.term)}` \| .*`{knob}`", MADE[f"{name}.md"], re.MULTILINE)


def test_the_names_of_other_frameworks_are_all_listed() -> None:
    told = MADE["knobs.md"].split("## Names of other frameworks")[1]
    listed = re.findall(r"^\| `(\w+)[` ]", told, re.MULTILINE)
    assert listed == [*NEW_NAMES, *SWITCHES, *VALUES, *GONE]


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_sets_what_its_row_says(name: str) -> None:
    theirs, ours = re.findall(rf"^\| `({name} = .+)` \| `(.+)` \|$", MADE["knobs.md"], re.MULTILINE)[0]
    assert translate(tomllib.loads(theirs)) == tomllib.loads(ours)
    assert translate({name: not SWITCHES[name][0]}) == {}


def test_a_page_has_the_equations_that_its_knobs_use() -> None:
    assert "value_loss" in modules(Knobs(critic=True))
    assert "value_loss" not in modules(Knobs())
    assert {"proximal", "repair"} <= set(modules(Knobs(**PRESETS["decoupled"].knobs)))
    assert "masks" in modules(Knobs(**PRESETS["m2po"].knobs))


def test_what_a_page_shows_is_what_the_preset_sets() -> None:
    """Its lines, written into a configuration, make the same algorithm."""
    unset = {name: getattr(Knobs(), name) for name in PRESETS["sapo"].knobs}
    for name, preset in PRESETS.items():
        shown = re.findall(r"^- `(\w+ = .+)`$", MADE[f"{name}.md"], re.MULTILINE)
        assert policy("sapo", **{**unset, **tomllib.loads("\n".join(shown))}).knobs == Knobs(**preset.knobs)


def test_pages_say_only_what_is_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another algorithm adds its page, and a row to the index; no other page changes."""
    assert max(len(MADE[f"{name}.md"].split()) for name in names()) < 400
    monkeypatch.setitem(PRESETS, "another", PRESETS["gspo"])
    monkeypatch.setitem(PAGES, "another", PAGES["gspo"])
    changed = {name for name, content in pages().items() if MADE.get(name) != content}
    assert changed == {INDEX, "another.md"}


def test_every_symbol_and_part_that_a_page_uses_is_explained() -> None:
    shared = MADE["shared.md"]
    for name in names():
        for anchor in re.findall(r"\(shared\.md#([\w-]+)\)", MADE[f"{name}.md"]):
            assert f"## {anchor}\n" in shared.lower().replace("other knobs", "other-knobs")


def test_the_steps_of_adding_one_name_what_exists() -> None:
    told = (FOLDER / "adding.md").read_text()
    root = FOLDER.parents[1]
    for path in re.findall(r"`((?:trainers|tests)/[\w/]+\.py)`", told):
        assert (root / path).is_file(), path


def test_every_algorithm_names_its_source() -> None:
    assert SOURCES.keys() == set(names())
    for name, found in SOURCES.items():
        line = MADE[f"{name}.md"].split("\nSource: ")[1].splitlines()[0]
        assert found
        assert all(re.search(rf"\[{re.escape(one.title)}\]\(https://\S+\)", line) for one in found)
