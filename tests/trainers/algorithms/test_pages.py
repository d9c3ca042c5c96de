"""docs/algorithms says what the code does."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path

from trainers.algorithms.knobs import Knobs
from trainers.algorithms.pages import CURVES, FAMILIES, INDEX, knob_comments, modules, pages
from trainers.algorithms.presets import PRESETS
from trainers.algorithms.registry import names, policy

FOLDER = Path(__file__).parents[3] / "docs" / "algorithms"


def test_the_pages_are_what_the_code_says() -> None:
    found = {path.name: path.read_text() for path in FOLDER.glob("*.md")}
    assert found == pages(), "run: python -m trainers.algorithms.pages docs/algorithms"


def test_every_algorithm_has_a_page_a_curve_and_every_knob_a_meaning() -> None:
    for name in names():
        assert f"| [`{name}`]({name}.md) |" in pages()[INDEX]
        assert f"({CURVES}/{name}.svg)" in pages()[f"{name}.md"]
    assert {path.stem for path in (FOLDER / CURVES).iterdir()} == set(names())
    assert {preset.family for preset in PRESETS.values()} <= FAMILIES.keys()
    assert [name for _, name, _, _ in knob_comments()] == [field.name for field in fields(Knobs)]


def test_a_page_has_the_equations_that_its_knobs_use() -> None:
    assert "value_loss" in modules(Knobs(critic=True))
    assert "value_loss" not in modules(Knobs())
    assert {"proximal", "repair"} <= set(modules(Knobs(**PRESETS["decoupled"].knobs)))
    assert "masks" in modules(Knobs(**PRESETS["m2po"].knobs))


def test_what_a_page_shows_is_what_the_preset_sets() -> None:
    """Its lines, written into a configuration, make the same algorithm."""
    unset = {name: getattr(Knobs(), name) for name in PRESETS["sapo"].knobs}
    for name, preset in PRESETS.items():
        shown = re.findall(r"^- `(\w+ = .+)`$", pages()[f"{name}.md"], re.MULTILINE)
        assert policy("sapo", **{**unset, **tomllib.loads("\n".join(shown))}).knobs == Knobs(**preset.knobs)
