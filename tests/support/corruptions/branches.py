"""Forgeries of the ledger of a branch, each with the words in which `tiles` must name it. Entries as plain values, by
version from 0 on; version 0 was given, the others were trained on a selection of PLACES places."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from millrace.trainers.offline.order import ItemOrder

Entry = dict[str, Any]
Forgery = Callable[[list[Entry]], None]

PLACES = 4
SOURCE = "n.p.trajectories"
SEED = next(seed for seed in range(99) if [ItemOrder(2, 1, seed).items(step) for step in (0, 1)] == [[1], [0]])
"""with which the second item of the selection is trained before the first"""
DIGEST = hashlib.sha256("".join(f"{SOURCE}/0@{offset}\n" for offset in (2, 3, 0, 1)).encode()).hexdigest()


def place(offset: int, topic: str = SOURCE) -> dict[str, Any]:
    return {"topic": topic, "partition": 0, "offset": offset}


def group(*offsets: int) -> Entry:
    """A group of a branch, of samples at these offsets."""
    places = [place(at) for at in offsets]
    return {"seq": -1, "ticket": None, "group": f"g{offsets}", "trajectories": places, "lost": None, "cell": 0}


def entries() -> list[Entry]:
    """A branch of three versions, the last of which trains again what the first did."""
    trained = [[], [group(0, 1)], [group(2, 3)], [group(0, 1)]]
    config = json.dumps({"branch": {"batch": 1, "seed": SEED}})
    return [
        {"version": n, "seq_lo": 0, "seq_hi": 0, "groups": groups, "config": config} for n, groups in enumerate(trained)
    ]


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


def names_another_place(ledger: list[Entry]) -> None:
    ledger[2]["groups"][0]["trajectories"][1] = place(4)


def names_its_places_in_another_order(ledger: list[Entry]) -> None:
    ledger[2]["groups"][0]["trajectories"].reverse()


def names_its_groups_in_another_order(ledger: list[Entry]) -> None:
    ledger[1]["groups"], ledger[2]["groups"] = ledger[2]["groups"], ledger[1]["groups"]


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
    (names_another_place, "other places than their selection's digest says"),
    (names_its_places_in_another_order, "other places than their selection's digest says"),
    (names_its_groups_in_another_order, "other places than their selection's digest says"),
    (is_left_out, "follows 1"),
]
