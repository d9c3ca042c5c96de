"""The pages on extensions: each example passes the test that stands below it, and what they name exists."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

from tests.support.documents import ROOT, blocks

FOLDER = ROOT / "docs" / "extend"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")
RUN = [path for path in PAGES if "```python" in path.read_text()]
SLOW = {"verifier.md"}
"""those whose examples start processes"""


@pytest.mark.parametrize(
    "page", [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.name in SLOW)) for path in RUN]
)
def test_the_example_passes_its_test(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = re.findall(r"(?:[Ss]ave (?:it|this).*?|its test) as\s+`(\w+)\.py`", page.read_text(), re.DOTALL)
    for name, block in zip(names, blocks(page), strict=True):
        (tmp_path / f"{name}.py").write_text(block.text)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        module = importlib.import_module(names[-1])
        tests = [test for name, test in vars(module).items() if name.startswith("test_")]
        assert tests
        for test in tests:
            test()
    finally:
        for name in names:
            sys.modules.pop(name, None)


@pytest.mark.parametrize("page", [*PAGES, FOLDER / "README.md"], ids=lambda page: page.stem)
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert (page.parent / target).exists(), target
    plain = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for path in re.findall(r"`((?:infra|streams|producers|trainers|tests|schemas)/[\w./]+)`", plain):
        assert (ROOT / path).exists(), path
    for name, path in re.findall(r"`(\w+)`\s+(?:in|of)\s+`([\w/]+\.py)`", plain):
        assert re.search(rf"^(?:class |def )?{name}\b", (ROOT / path).read_text(), re.MULTILINE), (
            f"{path} has no {name}"
        )


def test_the_index_leads_to_every_page() -> None:
    index = (FOLDER / "README.md").read_text()
    assert [path.name for path in PAGES if f"]({path.name})" not in index] == []
