"""`millrace evaluate` on models whose answers are known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from millrace.apps.cli import evaluation
from millrace.apps.cli.main import app
from millrace.apps.demo import sort_digits, tiny
from millrace.consumers import version_zero
from millrace.consumers.audit import audit
from millrace.consumers.evaluation import find
from millrace.consumers.scores import publish
from millrace.infra.config import Settings, load
from millrace.infra.connect import connect
from millrace.infra.errors import PolicyError, TopicError
from millrace.infra.log.history.kinds import SCORES
from millrace.infra.log.history.reader import History
from millrace.infra.log.memory.bus import MemoryBus
from millrace.schemas.ids import new_id
from millrace.trainers.evaluation.answering import answer
from millrace.trainers.evaluation.answering import load as load_model
from millrace.trainers.offline.text import Encoder
from millrace.trainers.weights import checkpoint, manifest
from tests.support import lessons
from tests.support.learners import entries
from tests.support.scored import evaluation as evaluation_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that sorts about a third of all digits."""
    path = tmp_path_factory.mktemp("policy")
    tiny.make_sort_policy(path, seed=0)
    return path


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def evaluate(*words: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["evaluate", *words, "--json", "--no-record"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_model_that_sorts_some_scores_in_between(model: Path) -> None:
    words = ["--model", str(model), "--tasks", "sort-digits", "--samples", "8", "--k", "8,1,4", "--max-tokens", "7"]
    found = evaluate(*words, "--count", "64")
    one, four, eight = (found["estimates"][f"pass@{k}"] for k in (1, 4, 8))
    assert 0.1 < one["low"] < one["value"] < one["high"] < 0.7
    assert one["value"] == pytest.approx(found["estimates"]["mean"]["value"])
    assert one["value"] < four["value"] < eight["value"]
    assert found == evaluate(*words, "--count", "64"), "the same seed asks and answers the same"
    assert found != evaluate(*words, "--count", "64", "--seed", "1")
    assert found["digest"] is None
    assert (found["questions"], found["samples"], found["unjudged"]) == (64, 8, 0)


def test_tasks_from_a_file_are_judged_by_their_verifier(model: Path, tmp_path: Path) -> None:
    sort_digits.write_tasks(tmp_path / "tasks.jsonl", 40, seed=0, evaluation=True)
    words = ["--model", str(model), "--max-tokens", "7", "--temperature", "0"]
    file = evaluate(*words, "--tasks", "tasks.jsonl")
    ours = evaluate(*words, "--tasks", "sort-digits", "--count", "40")
    assert file["verifier"] == "exact"
    assert file["estimates"] == ours["estimates"]
    (tmp_path / "my_checks.py").write_text(
        "def check(task, output, episode):\n"
        "    if output.startswith('0'):\n"
        "        raise ValueError(output)\n"
        "    return 0.5\n"
    )
    own = evaluate(*words, "--tasks", "tasks.jsonl", "--verifier", "my_checks:check", "--success", "0.5")
    assert 0 < own["unjudged"] < 40
    assert own["estimates"]["pass@1"]["questions"] == 40 - own["unjudged"]
    assert own["estimates"]["pass@1"]["value"] == 1.0
    assert own["estimates"]["mean"]["value"] == 0.5


def test_a_table_for_people(model: Path) -> None:
    words = ["--model", str(model), "--tasks", "sort-digits", "--count", "4", "--max-tokens", "3", "--no-record"]
    done = CliRunner().invoke(app, ["evaluate", *words])
    assert done.exit_code == 0, done.output
    assert "recorded" not in done.stderr
    for word in ("4 prompts of sort-digits, 1 answers each", "pass@1", "[0.0000, 0.4899]", "4 answers were cut off"):
        assert word in done.stdout


def test_a_version_is_checked_and_named_by_its_digest(model: Path, tmp_path: Path) -> None:
    written = checkpoint.write(tmp_path / "versions", 3, checkpoint.adopt(model))
    words = ["--model", str(written.path), "--tasks", "sort-digits", "--count", "2", "--max-tokens", "7"]
    assert evaluate(*words)["digest"] == written.digest
    (written.path / manifest.NAME).write_text((written.path / manifest.NAME).read_text().replace("a", "b"))
    done = CliRunner().invoke(app, ["evaluate", *words])
    assert done.exit_code == 1
    assert "error: " in done.stderr


def test_what_cannot_be_evaluated_is_one_line(model: Path, tmp_path: Path) -> None:
    lessons.write(tmp_path / "odd.jsonl", [{"question": "x"}])
    lessons.write(tmp_path / "long.jsonl", [{"prompt": "0" * 600, "answer": "0"}])
    for words, reason in (
        (["--tasks", "sort-digits", "--k", "4"], "needs as many samples"),
        (["--tasks", "sort-digits", "--k", "x"], "write numbers"),
        (["--tasks", "missing.jsonl"], "there is no missing.jsonl"),
        (["--tasks", "odd.jsonl"], "neither messages nor prompt"),
        (["--tasks", "long.jsonl"], "the model takes 512"),
        (["--tasks", "sort-digits", "--version", "3"], "keep one of them"),
        (["--tasks", "odd.jsonl", "--verifier", "nothing:here"], "nothing to ask"),
    ):
        done = CliRunner().invoke(app, ["evaluate", "--model", str(model), *words])
        assert done.exit_code == 1, words
        assert reason in done.stderr


def test_where_no_broker_answers_the_result_is_printed_and_said_not_to_be_recorded(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_KAFKA__BOOTSTRAP", "127.0.0.1:9")
    monkeypatch.setattr("millrace.infra.connect.PATIENCE_S", 0.2)
    words = ["--model", str(model), "--tasks", "sort-digits", "--count", "4", "--max-tokens", "3", "--json"]
    done = CliRunner().invoke(app, ["evaluate", *words])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["questions"] == 4
    assert "The result is not recorded: " in done.stderr
    assert "127.0.0.1:9" in done.stderr


def test_what_a_version_came_to_is_kept_with_every_reward_and_the_audit_believes_it(
    world: tuple[Settings, MemoryBus], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, bus = world
    monkeypatch.setattr(evaluation, "connect_now", lambda _: nullcontext(bus))
    monkeypatch.setattr(evaluation, "version_to_evaluate", lambda settings, version: find(settings, bus, version))
    options = evaluation.EvaluationOptions("sort-digits", samples=4, k=(1, 4), count=16, max_tokens=7, seed=3)
    found = evaluation.evaluate(settings, options)
    place = evaluation.record(settings, found, gateway=False)
    (row,) = History(bus, settings.namespace, settings.policy.name).rows(SCORES)
    assert row.place == place
    assert (row["version"], row["versions"], row["digest"]) == (0, [0], found.digest)
    assert (row["seed"], row["tasks"], row["engine"]) == (3, "sort-digits", "in-process")
    assert row["pass_at"] == {"1": found.estimates["pass@1"].value, "4": found.estimates["pass@4"].value}
    assert row["mean"] == pytest.approx(found.estimates["mean"].value)
    assert [len(score["rewards"]) for score in row["scores"]] == [4] * 16
    report = audit(bus, settings.namespace, settings.policy.name)
    assert report.clean, report.violations[:3]
    assert report.finding("scores").checked == 1


def test_a_topic_that_is_missing_is_no_place_to_record(world: tuple[Settings, MemoryBus]) -> None:
    settings, bus = world
    entry = {"version": 0, "digest": "d", "hash": b""}
    with pytest.raises(TopicError):
        publish(settings, bus, evaluation_of("another", entry))  # type: ignore[arg-type]


@pytest.fixture
def world(model: Path, tmp_path: Path) -> Iterator[tuple[Settings, MemoryBus]]:
    settings, bus = load(flags={"home": str(tmp_path / "home")}), MemoryBus()
    bus.ensure_topics(settings.layout.specs())
    with pytest.raises(PolicyError, match="does not exist"):
        find(settings, bus)
    version_zero.create(settings, model, bus)
    yield settings, bus
    bus.close()


def test_a_version_is_found_in_the_ledger(world: tuple[Settings, MemoryBus]) -> None:
    settings, bus = world
    (entry,) = entries(bus, settings)
    newest = find(settings, bus)
    assert newest == find(settings, bus, 0)
    assert (newest.version, newest.digest, newest.ledger_hash) == (0, entry["digest"], entry["hash"].hex())
    _, digest = load_model(newest.path, newest.digest)
    assert digest == newest.digest
    with pytest.raises(PolicyError, match="no version 5: the newest is 0"):
        find(settings, bus, 5)
    newest.path.rename(newest.path.with_name("elsewhere"))
    with pytest.raises(PolicyError, match="are gone"):
        find(settings, bus)


def test_answers_do_not_depend_on_how_many_are_sampled_at_once_when_greedy(model: Path) -> None:
    loaded, _ = load_model(model)
    encoder = Encoder(model)
    prompts = [tiny.encode(digits) for digits in ("352041", "123", "99", "540213", "1")]
    said = [
        answer(loaded, encoder, prompts, n=1, max_tokens=7, temperature=0, at_once=at_once) for at_once in (1, 2, 256)
    ]
    assert said[0] == said[1] == said[2]
    assert [one.question for one in said[0]] == [0, 1, 2, 3, 4]


@pytest.mark.kafka
def test_the_newest_version_of_a_policy_on_a_broker(model: Path, broker: str) -> None:
    """What was evaluated is what the ledger says, from the command alone."""
    flags = {"kafka.bootstrap": broker, "namespace": f"evaluate-{new_id()}", "topics.slots": "1", "topics.shards": "1"}
    named = [word for key, value in flags.items() for word in ("--set", f"{key}={value}")]
    made = CliRunner().invoke(app, [*named, "policy", "create", "--model", str(model)])
    assert made.exit_code == 0, made.output
    words = ["--tasks", "sort-digits", "--count", "2", "--max-tokens", "7", "--json"]
    done = CliRunner().invoke(app, [*named, "evaluate", *words])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    with connect(load(flags=flags)) as bus:
        (entry,) = entries(bus, load(flags=flags))
    assert (found["policy"], found["version"]) == ("policy", 0)
    assert (found["digest"], found["ledger_hash"]) == (entry["digest"], entry["hash"].hex())
    done = CliRunner().invoke(app, [*named, "evaluate", *words, "--version", "7"])
    assert done.exit_code == 1
    assert "no version 7" in done.stderr
