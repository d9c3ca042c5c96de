"""When a program is failing, and what is shown of its log."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millrace.infra.machine.supervisor import OUTLIVED_S, WINDOW_S, End, failing, last_error

NOW = 10_000.0


def started(*ages: float) -> list[End]:
    return [End(NOW - age, had_started=True) for age in ages]


def test_one_accident_is_none() -> None:
    assert not failing("RUNNING", 100, [], NOW)
    assert not failing("RUNNING", 1, started(1), NOW)
    assert not failing("STARTING", 0, started(1), NOW)


def test_who_does_not_start_is_failing_at_once() -> None:
    assert failing("BACKOFF", 0, [End(NOW - 1, had_started=False)], NOW)
    assert failing("STARTING", 2, [End(NOW - 2, had_started=False)], NOW)
    assert failing("FATAL", 0, [], NOW)


def test_who_ends_again_and_again_is_failing_until_it_outlives_that() -> None:
    assert failing("RUNNING", 12, started(42, 12), NOW), "a role that needs half a minute to fail"
    assert not failing("RUNNING", OUTLIVED_S + 1, started(OUTLIVED_S + 31, OUTLIVED_S + 1), NOW)
    assert failing("RUNNING", 75, started(240, 75), NOW), "it lived longer than that before"
    assert not failing("RUNNING", 1, started(2 * WINDOW_S, 1), NOW), "what is long ago is forgiven"


@given(st.lists(st.floats(0, 2 * WINDOW_S), max_size=10), st.floats(0, 2 * WINDOW_S))
def test_every_program_that_stays_up_is_well_in_the_end(ages: list[float], up_s: float) -> None:
    ends = started(*sorted((age + up_s for age in ages), reverse=True))
    if up_s > WINDOW_S / 2:
        assert not failing("RUNNING", up_s, ends, NOW)


LOG = """\
2026-11-22 learn-0 INFO starting
Traceback (most recent call last):
  File "x.py", line 1, in error
KeyError: 'task'
2026-11-22 learn-0 INFO bye
"""


def test_the_newest_error_is_shown_and_nothing_that_a_terminal_obeys() -> None:
    assert last_error(LOG) == "KeyError: 'task'"
    assert last_error("\x1b[1;31merror:\x1b[0m no algorithm \x1b]0;grppo\x07\n\n") == "error: no algorithm ]0;grppo"
    assert last_error("just a line\n") == "just a line"
    assert last_error("") == ""
