"""Every name that the command line imports late exists, and takes what it is called with."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from infra.cli import deploy
from infra.cli.context import entry
from infra.cli.roles import ROLES

CALLS = {
    "consumers.policy:create": ["settings", Path(), "bus"],
    "streams.seal.policies:announce": ["settings", "bus"],
    "consumers.learner.layouts:started": ["learner"],
    "consumers.audit.command:run": ["settings", False, False],
    "consumers.report:write": ["settings", Path()],
    "consumers.why:explain": ["settings", "id"],
    "infra.cli.training:train": ["sft", {}, [], "console", "complain"],
    "infra.cli.evaluation:Options": ["sort-digits"],
    "infra.cli.evaluation:evaluate": ["settings", "options"],
    **{role.entry: ["settings"] for role in ROLES},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_it_exists_and_takes_its_arguments(name: str) -> None:
    inspect.signature(entry(name)).bind(*CALLS[name])


@pytest.mark.slow
def test_the_demo_takes_its_flags() -> None:
    inspect.signature(entry("infra.demo.run:run")).bind(home=Path(), seed=0, short=True)


def test_no_late_import_is_missing_here() -> None:
    folder = Path(deploy.__file__).parent
    text = "".join(path.read_text() for path in folder.glob("*.py") if path.name != "roles.py")
    assert text.count('entry("') == len(CALLS) - len(ROLES) + 1
