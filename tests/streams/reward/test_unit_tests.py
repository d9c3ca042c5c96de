"""Which files tests are, and what a run of them says."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.streams.reward.unit_tests import TESTS, How, Ran, count, files, program, verdict

TEXT = st.text(st.characters(exclude_characters="`", exclude_categories=["Cs"]), max_size=40)


@given(TEXT, TEXT, TEXT)
def test_the_program_is_the_last_fenced_block_or_everything(before: str, first: str, last: str) -> None:
    fenced = f"{before}\n```py\n{first}\n```\nwords\n```python\n{last}\n```\n"
    assert program(fenced) == last + "\n"
    assert program(before) == before


FENCED = re.compile(r"^[ \t]*(`{3,})[^\n`]*\n(.*?)^[ \t]*\1`*[ \t]*$", re.MULTILINE | re.DOTALL)
"""what a block is, in a form whose time grows with the square of a text"""


@given(st.lists(st.sampled_from(["```", "````", "x", "\n", "\n", " ", "\t", "py"]), max_size=30).map("".join))
def test_a_block_is_what_the_slow_rule_says(output: str) -> None:
    blocks = FENCED.findall(output)
    assert program(output) == (blocks[-1][1] if blocks else output)


@pytest.mark.parametrize("line", ["```x\n ```", "```x\n", "```\n", "```` \n``` x\n"])
def test_an_output_of_many_fences_is_read_in_time_linear_in_its_length(line: str) -> None:
    """2 MiB: with the square of that this would not end today."""
    assert len(program(line * ((2 << 20) // len(line)))) <= 2 << 20


@given(st.text(alphabet="./a\0s", max_size=8))
def test_no_file_of_a_task_lies_above_or_in_the_place_of_the_program(path: str) -> None:
    parts = path.split("/")
    if path == "s" or {"", ".", ".."} & set(parts) or "\0" in path:
        with pytest.raises(ValueError, match="bad_tests"):
            files({"tests": {"files": {path: "x"}}}, "s")
    else:
        assert files({"tests": {"files": {path: "x"}}}, "s") == {path: "x"}


@pytest.mark.parametrize(
    ("task", "failure"),
    [
        ({}, "no_tests"),
        ({"tests": {"files": {}}}, "no_tests"),
        ({"tests": "x"}, "bad_tests"),
        ({"tests": {"files": ["a"]}}, "bad_tests"),
        ({"tests": {"files": {"a": 1}}}, "bad_tests"),
        ({"tests": {"files": {"a" * 5000: "x"}}}, "bad_tests"),
        ({"tests": {"files": {str(n): "x" for n in range(5000)}}}, "bad_tests"),
    ],
)
def test_a_task_without_tests_is_a_labelled_failure(task: Any, failure: str) -> None:
    with pytest.raises(ValueError, match=failure):
        files(task, "solution.py")


@pytest.mark.parametrize("said", [-1, 1.5, True, "3", None, TESTS + 1])
def test_a_count_that_is_none_is_a_labelled_failure(said: Any) -> None:
    with pytest.raises(ValueError, match="bad_tests"):
        count({"tests": {"files": {"a": "x"}, "count": said}})


def test_a_count_may_be_left_out() -> None:
    assert (count({"tests": {"files": {}}}), count({"tests": {"count": 3}})) == (0, 3)


CASES = (
    b"<r><s><testcase/><testcase><failure/></testcase></s>"
    b"<s><testcase><skipped/></testcase><testcase><error/></testcase></s></r>"
)


@pytest.mark.parametrize(
    ("ran", "reported", "value", "label"),
    [
        (Ran(How.EXIT, 0, "", None), False, 1.0, "passed"),
        (Ran(How.EXIT, 1, "", None), False, 0.0, "failed"),
        (Ran(How.TIMEOUT, -9, "", None), False, 0.0, "timeout"),
        (Ran(How.EXIT, -11, "", None), False, 0.0, "killed"),
        (Ran(How.EXIT, 0, "", None), True, 0.0, "failed"),
        (Ran(How.EXIT, 0, "", b"torn"), True, 0.0, "failed"),
        (Ran(How.EXIT, 0, "", b"<r/>"), True, 0.0, "failed"),
        (Ran(How.EXIT, 1, "", CASES), True, 1 / 4, "failed"),
        (Ran(How.EXIT, 0, "", CASES), True, 1 / 4, "failed"),
        (Ran(How.EXIT, 2, "", CASES), True, 0.0, "failed"),
        (Ran(How.EXIT, 1, "", b"<r><testcase/></r>"), True, 0.0, "failed"),
        (Ran(How.EXIT, 2, "", b"<r><testcase/></r>"), True, 0.0, "failed"),
        (Ran(How.EXIT, 0, "", b"<r><testcase/></r>"), True, 1.0, "passed"),
        (Ran(How.TIMEOUT, -9, "", b"<r><testcase/></r>"), True, 0.0, "timeout"),
    ],
)
def test_what_a_run_says(ran: Ran, reported: bool, value: float, label: str) -> None:
    found = verdict(ran, by_report=reported)
    assert (found.value, found.label, found.failure) == (value, label, None)
    assert (found.confidence, found.signal) == (1.0, "deterministic_check")


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 1))
def test_a_test_that_a_task_counts_and_the_report_lacks_did_not_pass(shown: int, counted: int, status: int) -> None:
    found = verdict(Ran(How.EXIT, status, "", b"<r>%s</r>" % (b"<testcase/>" * shown)), by_report=True, count=counted)
    if status == 1 and shown >= counted:
        assert found.value == 0.0, "a failed test that no report shows"
    else:
        assert found.value == (shown / max(shown, counted, 1))
    assert (found.label == "passed") == (status == 0 and shown >= max(counted, 1))
    assert found.components["tests.total"] == max(shown, counted)


def test_a_command_that_did_not_start_says_nothing_of_the_program() -> None:
    found = verdict(Ran(How.NO_START, 127, "", None), by_report=False)
    assert (found.value, found.failure) == (None, "not_started")


@given(st.binary(max_size=200), st.integers(-64, 255), st.sampled_from(How), st.booleans())
def test_no_report_raises(report: bytes, status: int, how: How, reported: bool) -> None:
    found = verdict(Ran(how, status, "x" * 5000, report), by_report=reported)
    assert found.value in (None, 0.0, 1.0)
    assert len(found.critique or "") <= 2000
