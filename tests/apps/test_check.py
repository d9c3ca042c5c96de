"""What `check` says of a newcomer's own code before anything starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millrace.apps.answers import Answer
from millrace.apps.check import check
from millrace.apps.cli.main import app
from millrace.apps.doctor import examine
from millrace.infra.config import load
from millrace.streams.reward.running import namespace_fault
from millrace.trainers.algorithms.names import PAIRS
from millrace.trainers.algorithms.registry import OTHERS

AGENT = "async def agent(task, base_url, api_key):\n    return task['id']\n"
VERIFIER = "def verify(task, output, episode):\n    return float(output == task['answer'])\n"
TASK = {"id": "a", "messages": [{"role": "user", "content": "1"}], "answer": "1"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def said(home: Path, code: str = AGENT + VERIFIER, task: dict | None = None, **flags: str) -> dict[str, Answer]:
    """What is said of a module that no other test imports."""
    module = f"code_{home.name.replace('-', '_')}"
    (home / f"{module}.py").write_text(code)
    (home / "tasks.jsonl").write_text(json.dumps(task or TASK) + "\n")
    named = {"rollout.agent": f"{module}:agent", "rollout.tasks": "tasks.jsonl"} | {
        key.replace("__", "."): value.replace("MODULE", module) for key, value in flags.items()
    }
    return {answer.question: answer for answer in check(load(flags=named))}


def test_what_is_right_is_said_to_be_right(home: Path) -> None:
    found = said(home, reward__verifier="MODULE:verify")
    assert [answer.word for answer in found.values()] == ["ok"] * 4, found
    assert list(found) == ["agent", "tasks", "verifier", "algorithm"]
    assert "gives 0 to an empty output" in found["verifier"].said


@pytest.mark.parametrize(
    ("section", "question", "words"),
    [
        (
            '[gateway.upstreams.openai]\nurl = "http://x/v1"\nspeaks = ["chat", "respones"]\n',
            "upstreams",
            "[gateway.upstreams.openai] speaks: 'respones' is none of the APIs chat, completions, embeddings, messages",
        ),
        ('[gateway]\nrenderer = "qwen33"\n', "renderers", "[gateway] renderer 'qwen33' is not supported"),
        (
            '[gateway.policies.small]\nrenderer = "qwen33"\n',
            "renderers",
            "[gateway.policies.small] renderer 'qwen33' is not supported",
        ),
    ],
)
def test_what_the_gateway_would_not_start_with_is_bad(home: Path, section: str, question: str, words: str) -> None:
    file = home / "millrace.toml"
    file.write_text(section)
    for found in (check(load(file)), examine(load(file))):
        answer = next(one for one in found if one.question == question)
        assert answer.word == "bad"
        assert words in answer.said
    for right, wrong in (("responses", "respones"), ("qwen3", "qwen33")):
        section = section.replace(wrong, right)
    file.write_text(section)
    assert next(one for one in check(load(file)) if one.question == question).word == "ok"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import nosuchmodule\n", "No module named 'nosuchmodule'"),
        ("def agnet(task, base_url, api_key): ...\n", "has no attribute 'agent'"),
        ("def agent(task): ...\n", "must take (task, base_url, api_key); it takes (task)"),
        ("def agent(:\n", "SyntaxError"),
        ("x = 1\ny = undefined_name\n", "line 2"),
    ],
)
def test_an_agent_that_cannot_run_is_bad(home: Path, code: str, words: str) -> None:
    answer = said(home, code)["agent"]
    assert answer.word == "bad"
    assert words in answer.said


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def verify(task, output): ...\n", "must take (task, output, episode)"),
        ("def verify(task, output, episode): return task['solution']\n", "error: KeyError"),
        ("def verify(task, output, episode): return 'good'\n", "error: ValueError"),
    ],
)
def test_a_verifier_that_fails_on_the_first_task_is_bad(home: Path, code: str, words: str) -> None:
    answer = said(home, AGENT + code, reward__verifier="MODULE:verify")["verifier"]
    assert answer.word == "bad"
    assert words in answer.said


def test_tasks_without_an_answer_cannot_be_compared_with_one(home: Path) -> None:
    answer = said(home, task={"id": "a", "prompt": "1"})["verifier"]
    assert answer.word == "bad"
    assert "The task has id, prompt" in answer.said


@pytest.mark.parametrize(
    ("verifier", "words"), [("judge", "set url under [reward.judge]"), ("tests", "set command under [reward.tests]")]
)
def test_a_judge_or_tests_that_are_not_described_are_bad(home: Path, verifier: str, words: str) -> None:
    answer = said(home, reward__verifier=verifier)["verifier"]
    assert (answer.word, words in answer.said) == ("bad", True), answer


@pytest.mark.parametrize("namespaces", ["true", "false"])
def test_programs_that_nothing_keeps_apart_are_a_warning(
    home: Path, namespaces: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In namespaces, where the kernel gives them, there is nothing to warn of."""
    monkeypatch.setattr("millrace.streams.reward.running._hide", lambda: None)  # it would last
    told = {"reward__verifier": "tests", "reward__tests__namespaces": namespaces}
    task = TASK | {"tests": {"files": {"check.py": "import solution\n"}}}
    answer = said(home, task=task, reward__tests__command=json.dumps([sys.executable, "check.py"]), **told)["verifier"]
    apart = namespaces == "true" and not namespace_fault()
    assert answer.word == ("ok" if apart else "warning"), answer
    assert ("in no namespaces" in answer.said) is not apart


def test_a_judge_that_is_described_is_not_asked(home: Path) -> None:
    """Nobody listens where it is said to be."""
    (home / "rubric.md").write_text("1 for a sorted list.")
    told = {"reward__judge__url": "http://127.0.0.1:9/v1", "reward__judge__model": "m"}
    answer = said(home, reward__verifier="judge", reward__judge__rubric=str(home / "rubric.md"), **told)["verifier"]
    assert (answer.word, answer.said.startswith("m judges by ")) == ("ok", True), answer


def test_tasks_and_algorithm_that_are_none_are_bad(home: Path) -> None:
    found = said(home, rollout__tasks="nosuch.jsonl", learner__algorithm="grppo")
    assert (found["tasks"].word, found["algorithm"].word) == ("bad", "bad")
    assert "did you mean 'grpo'" in found["algorithm"].said


@pytest.mark.parametrize("algorithm", sorted(PAIRS))
def test_an_algorithm_of_pairs_wants_groups_of_two(home: Path, algorithm: str) -> None:
    reference = {"learner__reference": "base"} if algorithm != "reward-model" else {}
    answer = said(home, learner__algorithm=algorithm, **reference)["algorithm"]
    assert answer.word == "bad"
    assert "groups of 8 are none: set [policy] group_size to 2" in answer.said
    assert said(home, learner__algorithm=algorithm, policy__group_size="2")["algorithm"].word == "ok"


def test_the_algorithms_of_pairs_are_those_that_never_split_a_group() -> None:
    assert {name for name, other in OTHERS.items() if other.kind.whole} == PAIRS


@pytest.mark.parametrize("command", ["up", "dispatch", "learn"])
def test_nothing_starts_that_could_not_learn(home: Path, command: str) -> None:
    flags = ["--set", "learner.algorithm=dpo", "--set", f"home={home / 'home'}", "--set", "kafka.bootstrap=127.0.0.1:1"]
    done = CliRunner().invoke(app, [*flags, command])
    assert done.exit_code == 1
    assert "set [policy] group_size to 2" in " ".join((done.stderr or done.output).split())
    assert not (home / "home").exists(), "nothing was begun"


def test_half_a_rollout_is_a_warning(home: Path) -> None:
    assert said(home, rollout__tasks="")["tasks"].word == "warning"
    assert said(home, rollout__agent="")["agent"].word == "warning"


def test_doctor_asks_the_same(home: Path) -> None:
    flags = {"rollout.agent": "nosuch:agent", "kafka.bootstrap": "127.0.0.1:1", "engine.local": "false"}
    found = {answer.question: answer for answer in examine(load(flags=flags))}
    assert found["agent"].word == "bad"
