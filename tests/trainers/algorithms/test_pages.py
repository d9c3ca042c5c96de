"""docs/algorithms says what the code does."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path

from trainers.algorithms.knobs import Knobs
from trainers.algorithms.pages import FAMILIES, INDEX, knob_comments, pages
from trainers.algorithms.presets import PRESETS
from trainers.algorithms.registry import names, policy

FOLDER = Path(__file__).parents[3] / "docs" / "algorithms"


def test_the_pages_are_what_the_code_says() -> None:
    found = {path.name: path.read_text() for path in FOLDER.iterdir()}
    assert found == pages(), "run: python -m trainers.algorithms.pages docs/algorithms"


def test_every_algorithm_has_a_page_and_every_knob_a_meaning() -> None:
    for name in names():
        assert f"| `{name}` |" in pages()[INDEX]
    assert {preset.family for preset in PRESETS.values()} <= FAMILIES.keys()
    assert [name for _, name, _, _ in knob_comments()] == [field.name for field in fields(Knobs)]


def test_what_a_page_shows_is_what_the_preset_sets() -> None:
    """Its lines, written into a configuration, make the same algorithm."""
    unset = {name: getattr(Knobs(), name) for name in PRESETS["sapo"].knobs}
    for name, preset in PRESETS.items():
        page = pages()[f"{preset.family}.md"].split(f"## {name}\n", 1)[1].split("\n## ", 1)[0]
        shown = re.findall(r"^- `(\w+ = .+)`$", page, re.MULTILINE)
        assert policy("sapo", **{**unset, **tomllib.loads("\n".join(shown))}).knobs == Knobs(**preset.knobs)
