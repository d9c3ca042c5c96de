"""Every name that the command line imports late exists, and takes what it is called with."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from millrace.apps.cli import deploy
from millrace.apps.cli.context import entry
from millrace.apps.cli.roles import ROLES

CALLS = {
    "millrace.consumers.policy:create": ["settings", Path(), "bus"],
    "millrace.streams.seal.policies:announce": ["settings", "bus"],
    "millrace.consumers.learner.layouts:started": ["learner"],
    "millrace.consumers.audit.command:run": ["settings", False, False, False],
    "millrace.consumers.report:write": ["settings", Path()],
    "millrace.consumers.why:explain": ["settings", "id"],
    "millrace.apps.cli.training:train": ["sft", {}, [], "console", "complain"],
    "millrace.apps.cli.evaluation:Options": ["sort-digits"],
    "millrace.apps.cli.evaluation:evaluate": ["settings", "options"],
    **{role.entry: ["settings"] for role in ROLES},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_it_exists_and_takes_its_arguments(name: str) -> None:
    inspect.signature(entry(name)).bind(*CALLS[name])


@pytest.mark.slow
def test_the_demo_takes_its_flags() -> None:
    inspect.signature(entry("millrace.apps.demo.run:run")).bind(home=Path(), seed=0, short=True)


def test_no_late_import_is_missing_here() -> None:
    folder = Path(deploy.__file__).parent
    text = "".join(path.read_text() for path in folder.glob("*.py") if path.name != "roles.py")
    assert text.count('entry("') == len(CALLS) - len(ROLES) + 1
