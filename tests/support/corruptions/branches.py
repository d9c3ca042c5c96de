"""Forgeries of the ledger of a branch, each with the words in which `tiles` must name it. Entries as plain values, by
version from 0 on; version 0 was given, the others were trained on a selection of PLACES places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Entry = dict[str, Any]
Forgery = Callable[[list[Entry]], None]

PLACES = 4
SOURCE = "n.p.trajectories"


def place(offset: int, topic: str = SOURCE) -> dict[str, Any]:
    return {"topic": topic, "partition": 0, "offset": offset}


def group(*offsets: int) -> Entry:
    """A group of a branch, of samples at these offsets."""
    places = [place(at) for at in offsets]
    return {"seq": -1, "ticket": None, "group": f"g{offsets}", "trajectories": places, "lost": None, "cell": 0}


def entries() -> list[Entry]:
    """A branch of three versions, the last of which trains again what the first did."""
    trained = [[], [group(0, 1)], [group(2, 3)], [group(0, 1)]]
    return [{"version": n, "seq_lo": 0, "seq_hi": 0, "groups": groups} for n, groups in enumerate(trained)]


def takes_of_the_order(ledger: list[Entry]) -> None:
    ledger[2]["seq_hi"] = ledger[3]["seq_lo"] = ledger[3]["seq_hi"] = 2


def names_a_seq(ledger: list[Entry]) -> None:
    ledger[2]["groups"][0]["seq"] = 0


def names_nothing(ledger: list[Entry]) -> None:
    ledger[2]["groups"] = []


def names_a_group_without_places(ledger: list[Entry]) -> None:
    ledger[2]["groups"][0]["trajectories"] = []


def names_another_policy(ledger: list[Entry]) -> None:
    ledger[2]["groups"][0]["trajectories"] = [place(2, "n.q.trajectories")]


def names_an_evaluation(ledger: list[Entry]) -> None:
    ledger[2]["groups"][0]["trajectories"] = [place(2, "n.p.evaluations")]


def names_its_own_topic(ledger: list[Entry]) -> None:
    ledger[2]["groups"][0]["trajectories"] = [place(2, "n.b.trajectories")]


def names_more_than_was_selected(ledger: list[Entry]) -> None:
    ledger[3]["groups"].append(group(4))


def is_left_out(ledger: list[Entry]) -> None:
    del ledger[2]


BROKEN: list[tuple[Forgery, str]] = [
    (takes_of_the_order, "takes seqs 0 to 2 of the order"),
    (names_a_seq, "all of them under no seq"),
    (names_nothing, "does not name the places"),
    (names_a_group_without_places, "does not name the places"),
    (names_another_policy, "no trajectory of p"),
    (names_an_evaluation, "no trajectory of p"),
    (names_its_own_topic, "no trajectory of p"),
    (names_more_than_was_selected, "name 5 places of a selection of 4"),
    (is_left_out, "follows 1"),
]
