"""A step as one line."""

from __future__ import annotations

from millrace.trainers.tracking.line import line


def test_a_line_says_what_is_known_in_a_fixed_order() -> None:
    metrics = {"tokens_per_second": 12345.6, "clipped": 0.125, "kl": 0.0123, "entropy": 1.5, "reward_mean": 0.25}
    expected = "reward 0.250  entropy 1.500  KL 0.0123  clipped 12.5%  12,346 tokens/s"
    assert line(metrics) == expected
    assert line(dict(reversed(metrics.items()))) == expected
    assert line({**metrics, "unheard_of": 1.0, "mfu": 0.4}) == f"{expected}  MFU 40.0%"


def test_what_means_nothing_is_left_out() -> None:
    assert line({"loss": 1.0, "reward_mean": 0.5}, without=frozenset({"reward_mean"})) == "loss 1.0000"
    assert line({}) == ""
