"""Every name that the command line imports late exists, and takes what it is called with."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from millrace.apps.cli import deploy
from millrace.apps.cli.context import entry
from millrace.apps.cli.roles import ROLES

CALLS = {
    "millrace.consumers.version_zero:create": ["settings", Path(), "bus"],
    "millrace.streams.seal.policy_terms:announce": ["settings", "bus"],
    "millrace.consumers.learner.group.layouts:learner_count": ["learner"],
    "millrace.consumers.audit.command:run": ["settings", False, False, False],
    "millrace.consumers.tell.command:report": ["settings", Path()],
    "millrace.consumers.tell.command:explain": ["settings", "id"],
    "millrace.consumers.warehouse.questions.catalog:questions": [],
    "millrace.consumers.warehouse.questions.catalog:values": ["question", {}],
    "millrace.consumers.warehouse.client:open_asking": ["settings", "overdue"],
    "millrace.consumers.warehouse.client:leave": [],
    "millrace.consumers.warehouse.questions.versions:check": ["asking", "question", {}],
    "millrace.apps.cli.training:train": ["sft", {}, [], "console", "complain"],
    "millrace.apps.cli.evaluation:EvaluationOptions": ["sort-digits"],
    "millrace.apps.cli.evaluation:evaluate": ["settings", "options"],
    "millrace.apps.cli.evaluation:record": ["settings", "found"],
    "millrace.consumers.replay.prove.command:ReplayOptions": ["all"],
    "millrace.consumers.replay.prove.command:prove": ["settings", "options"],
    "millrace.consumers.replay.prove.command:train_dump": ["settings", Path()],
    "millrace.consumers.warehouse.open_store:take_server": ["settings", ["other"]],
    "millrace.consumers.warehouse.rebuild:rebuild": ["settings"],
    "millrace.formats.exports.select:from_flags": ["", "", [], [], "train", [], []],
    "millrace.formats.imports.run:from_flags": ["", "local", "train", "", "stop", None],
    "millrace.formats.imports:import_files": ["settings", [Path()], "options", "ready", "told"],
    "millrace.producers.intake.run:owner_of": ["key", "url"],
    "millrace.producers.intake.run:stdio": [["command"], "owner", "server", Path()],
    "millrace.producers.intake.run:agent": [
        "url",
        "host",
        0,
        "owner",
        "gateway",
        "name",
        Path(),
        "key",
        True,
        "told",
    ],
    "millrace.producers.intake.run:http": ["url", "host", 0, "owner", "gateway", "server", Path(), "told"],
    "millrace.streams.seal.policy_terms:check_announcement": ["settings", "bus"],
    "millrace.consumers.clearance:today": ["settings"],
    "millrace.formats.exports:export": ["settings", "jsonl", Path(), "selection", "allowed", "watch"],
    "millrace.consumers.replay.rejudge:RejudgeRequest": ["name", "exact", "v2", "replay", 1, 10.0],
    "millrace.consumers.replay.rejudge:lines": ["report"],
    "millrace.consumers.replay.rejudge:run": ["settings", "asked", "selection", "told", "SELECT 1"],
    "millrace.consumers.replay.sql_selection:one": ["SELECT 1"],
    "millrace.consumers.replay.branch.command:branch": ["settings", "options"],
    "millrace.consumers.replay.branch.job:BranchOptions": ["name"],
    "millrace.consumers.replay.rebuild.command:run": ["settings", ["events"], Path()],
    "millrace.consumers.tell.command:lineage": ["settings", "id"],
    "millrace.consumers.tell.command:show": ["settings", "id"],
    "millrace.streams.refine.subjects.store:key_in": [Path()],
    "millrace.streams.refine.subjects.store:read": [Path(), b"key"],
    "millrace.streams.refine.subjects.store:write": [Path(), b"key", {}],
    **{role.entry: ["settings"] for role in ROLES},
}
FLAGS = {
    "millrace.formats.exports.select:from_flags": {"best": False},
    "millrace.apps.cli.evaluation:record": {"gateway": True},
    "millrace.formats.imports.run:from_flags": {"dry_run": False},
}
"""what is given by name and has no default"""


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_it_exists_and_takes_its_arguments(name: str) -> None:
    inspect.signature(entry(name)).bind(*CALLS[name], **FLAGS.get(name, {}))


@pytest.mark.slow
def test_the_demo_takes_its_flags() -> None:
    inspect.signature(entry("millrace.apps.demo.run:run")).bind(home=Path(), seed=0, is_short=True)


def test_no_late_import_is_missing_here() -> None:
    folder = Path(deploy.__file__).parent
    text = "".join(path.read_text() for path in folder.glob("*.py"))
    named = set(re.findall(r'\bentry\(\s*"([^"]+)"', text))
    assert named == (CALLS.keys() - {role.entry for role in ROLES}) | {"millrace.apps.demo.run:run"}
