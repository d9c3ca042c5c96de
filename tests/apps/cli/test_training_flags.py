"""Options of the commands that train are the fields of a job: nothing of them is written a second time."""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner
from typing_extensions import Doc

from millrace.apps.cli import offline
from millrace.apps.cli.main import app
from millrace.apps.cli.training_flags import SPELLINGS, RunFlags
from millrace.trainers.offline.job import Bounds, Job

COMMANDS = {"sft": "sft", "dpo": "dpo", "reward-model": "reward-model", "distill": "distill-forward"}
HINTS = get_type_hints(Job, include_extras=True) | get_type_hints(RunFlags, include_extras=True)
FIELDS = {field.name: field for owner in (Job, RunFlags) for field in fields(owner)}
CHOICES = {"algorithm", "direction"}
"""options that choose the job's algorithm"""
DEFAULTS = {("dpo", "lr"): 1e-6, ("distill", "teacher"): MISSING}


def flag(name: str) -> str:
    return f"--{SPELLINGS.get(name, name).replace('_', '-')}"


def options(command: str) -> dict[str, Any]:
    """The options of a command by name."""
    group: Any = typer.main.get_command(app)
    return {option.name: option for option in group.commands[command].params}


def notes(name: str, kind: type) -> list[Any]:
    return [note for note in get_args(HINTS[name]) if isinstance(note, kind)]


@pytest.mark.parametrize("command", COMMANDS)
def test_each_option_says_what_its_field_says(command: str) -> None:
    for name, option in options(command).items():
        if name in CHOICES:
            continue
        default = DEFAULTS.get((command, name), FIELDS[name].default)
        assert option.opts == [flag(name)]
        assert option.secondary_opts == [], f"{name} needs no --no-{name}"
        assert [option.help] == [note.documentation for note in notes(name, Doc)]
        assert option.required == (default is MISSING and name != "knobs")
        assert option.required or option.default == (None if name == "knobs" else default)
        for bounds in notes(name, Bounds):
            assert (option.min, option.max) == (bounds.least, bounds.most)


def test_each_field_has_an_option() -> None:
    names = {name for command in COMMANDS for name in options(command)}
    assert names - CHOICES == {*FIELDS} - {"algorithm", "lora"}


VALUES = {
    bool: st.just(True),
    int: st.integers(1, 10**9),
    float: st.floats(0, 0.99, allow_nan=False),
    str: st.sampled_from(["cpu", "linear"]),
    Path: st.just(Path(__file__).parent),
}


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A command, and values of some of its options, among them all that must be given."""
    command = draw(st.sampled_from(sorted(COMMANDS)))
    values = {}
    for name, option in options(command).items():
        if name in CHOICES | {"knobs", "tracker"} or not (option.required or draw(st.booleans())):
            continue
        hint = get_args(HINTS[name])[0]
        kind = next((each for each in VALUES if each in (hint, *get_args(hint))), str)
        values[name] = draw(VALUES[kind])
    return command, values


@given(calls())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_what_is_given_reaches_the_job(call: tuple[str, dict[str, Any]]) -> None:
    command, values = call
    jobs: list[tuple[Any, ...]] = []
    words = [command, "--knob", "beta=0.5", "--knob", "word=x", "--tracker", "wandb"]
    for name, value in values.items():
        words += [flag(name)] if value is True else [flag(name), str(value)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offline, "entry", lambda name: lambda *arguments: jobs.append(arguments[:3]))
        result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    ((algorithm, given_options, trackers),) = jobs
    assert (algorithm, trackers) == (COMMANDS[command], ["wandb"])
    assert given_options.pop("knobs") == {"beta": 0.5, "word": "x"}
    for name, value in given_options.items():
        assert value == values.get(name, DEFAULTS.get((command, name), FIELDS[name].default))
    assert values.keys() <= given_options.keys()


@pytest.mark.parametrize(("command", "words"), [("sft", ["--epochs", "0"]), ("distill", ["--holdout", "1"])])
def test_what_is_out_of_bounds_is_refused(command: str, words: list[str]) -> None:
    result = CliRunner().invoke(app, [command, *words])
    assert result.exit_code == 2
    assert words[0] in result.output
