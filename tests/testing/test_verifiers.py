"""The check of verifiers passes those that keep the contract, and names each way of breaking it."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.infra.errors import RewardError
from millrace.testing import Attempt, check_verifier, judge

TASK = {"id": "sort-1", "answer": "012345"}
RIGHT, WRONG = Attempt(TASK, "012345"), Attempt(TASK, "", "failed")
BREACHES = {
    "raises": ("return len(task['answer']) / len(output)", r"whose output is '', has no value \(error: ZeroDivision"),
    "remembers": ("SEEN.append(output); return len(SEEN)", "value was 1.0, then 11.0"),
    "is infinite": ("return float(output.strip('[{') or 'inf')", r"has no value \(error: ValueError\)"),
    "ends its process": ("return os._exit(3) if output == 'nan' else 1", "'nan', ended the verifier's process"),
    "never ends": ("return time.sleep(60) if output == 'nan' else 1", "'nan', was not judged within 2 s"),
    "goes by the order of a set": ("return dict(value=1, label=min(map(str, map(hash, 'ab'))))", "label was '"),
}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A module of the user, whose function has this body."""
    name = f"verifier_{abs(hash(request.node.name))}"
    source = f"import os, time\n\nSEEN = []\n\n\ndef verify(task, output, episode):\n    {request.param}\n"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    return f"{name}:verify"


@pytest.mark.parametrize(
    "module",
    ["return dict(value=output == task['answer'], components=dict(steps=episode['steps']), label=episode['status'])"],
    indirect=True,
)
def test_what_a_verifier_says_comes_back_as_the_reward_that_the_role_writes(module: str) -> None:
    right, wrong = check_verifier(module, [RIGHT, WRONG])
    assert (right["value"], right["label"], right["components"]) == (1.0, "completed", {"steps": 2.0})
    assert (wrong["value"], wrong["label"]) == (0.0, "failed")
    assert (right["source"], right["failure"]) == ("verifier", None)
    assert right["target"] != wrong["target"]


@pytest.mark.parametrize(("module", "said"), BREACHES.values(), ids=BREACHES, indirect=["module"])
@pytest.mark.slow
def test_each_breach_is_named(module: str, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_verifier(module, [RIGHT], timeout_s=2)


async def test_judging_works_beside_an_event_loop_and_a_failure_is_a_reward_without_a_value() -> None:
    (scored,) = judge("exact", [RIGHT])
    (failed,) = judge("exact", [Attempt({}, "012345")])
    assert (scored["value"], scored["failure"]) == (1.0, None)
    assert (failed["value"], failed["failure"]) == (None, "error: KeyError")


def test_a_verifier_that_is_not_there_is_told() -> None:
    with pytest.raises(RewardError, match="cannot be loaded"):
        judge("no_such_module:verify", [RIGHT])
