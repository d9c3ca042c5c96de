from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.consumers.learner.version.collect import choose, choose_deltas, collect
from millrace.infra import durable, faults
from millrace.infra.versions import PIN

DIGESTS = {n: f"{n:012x}" + "0" * 52 for n in range(6)}
MINE = [f"v{n}-{DIGESTS[n][:12]}" for n in DIGESTS]


def chosen(names: list[str], **over: object) -> list[str]:
    settings = {"keep": 2, "serving": set(), "pins": set(), **over}
    return choose(names, DIGESTS, **settings)  # type: ignore[arg-type]


def test_the_newest_and_the_first_stay() -> None:
    assert chosen(MINE) == MINE[1:4]


def test_what_an_engine_serves_or_a_pin_holds_stays() -> None:
    assert chosen(MINE, serving={1}, pins={MINE[2]}) == [MINE[3]]


def test_every_nth_stays_for_good(tmp_path: Path) -> None:
    assert chosen(MINE, every=2) == [MINE[1], MINE[3]]
    assert chosen(MINE, every=3, keep=1) == [MINE[1], MINE[2], MINE[4]]
    assert chosen([*MINE, "v2-ffffffffffff"], every=2) == [MINE[1], "v2-ffffffffffff", MINE[3]], "an orphan goes"
    for name in MINE:
        (tmp_path / name).mkdir()
    assert collect(tmp_path, DIGESTS, keep=1, serving=(), every=2) == [MINE[1], MINE[3]]


def test_an_orphan_goes_once_its_number_is_committed() -> None:
    assert chosen(["v5-ffffffffffff", "v6-ffffffffffff", "v7-ffffffffffff"]) == ["v5-ffffffffffff"]


def test_a_version_whose_record_cannot_be_read_stays() -> None:
    known = {number: digest for number, digest in DIGESTS.items() if number != 2}
    assert choose(MINE, known, keep=1, serving=set(), pins=set()) == [MINE[1], *MINE[3:5]]
    deltas = [f"{name}.delta" for name in MINE]
    assert f"{MINE[4]}.delta" not in choose_deltas(deltas, {5: DIGESTS[5]}, keep=1, deltas={4, 5})


def test_drafts_go_once_their_number_is_committed() -> None:
    names = [".tmp-v5-0011aabbccdd", ".tmp-v6-0011aabbccdd", ".tmp-v5-0011aabbccdd-damaged"]
    assert chosen(names) == [names[0], names[2]]


def test_what_is_not_ours_stays() -> None:
    assert chosen(["lost+found", "v3", "v3-xyz", "notes"]) == []


def test_collect_removes_from_disk(tmp_path: Path) -> None:
    for name in MINE:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / MINE[1] / PIN).touch()
    assert collect(tmp_path, DIGESTS, keep=2, serving=()) == MINE[2:4]
    assert sorted(path.name for path in tmp_path.iterdir()) == [MINE[0], MINE[1], MINE[4], MINE[5]]


def test_what_is_pinned_after_it_was_chosen_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MINE:
        (tmp_path / name).mkdir()

    def late(*given: Any, **more: Any) -> list[str]:
        (tmp_path / MINE[2] / PIN).touch()
        return choose(*given, **more)

    monkeypatch.setattr("millrace.consumers.learner.version.collect.choose", late)
    assert collect(tmp_path, DIGESTS, keep=2, serving=()) == [MINE[1], MINE[3]]
    assert sorted(path.name for path in tmp_path.iterdir()) == [MINE[0], MINE[2], *MINE[4:]]


@pytest.mark.parametrize("point", ["versions.in_removal", "versions.after_removal"])
def test_a_collection_that_is_cut_short_leaves_whole_versions_or_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    for name in MINE:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")

    def killed(name: str) -> None:
        if name == point:
            raise KeyboardInterrupt

    with monkeypatch.context() as armed:
        armed.setattr(faults, "point", killed)
        with pytest.raises(KeyboardInterrupt):
            collect(tmp_path, DIGESTS, keep=2, serving=())
    named = [path for path in tmp_path.iterdir() if path.name in MINE]
    assert sorted(path.name for path in named) == [MINE[0], *MINE[2:]]
    assert all((path / "file").exists() for path in named)
    collect(tmp_path, DIGESTS, keep=2, serving=())
    assert sorted(path.name for path in tmp_path.iterdir()) == [MINE[0], *MINE[4:]]


DELTAS = [f"{name}.delta" for name in MINE]


def test_what_leads_to_the_newest_stays() -> None:
    """Versions 0 and 3 are whole: 4 and 5 need 3, whose own delta there is none of."""
    assert chosen(MINE, deltas={1, 2, 4, 5}) == [MINE[1], MINE[2]]
    assert choose_deltas(DELTAS, DIGESTS, keep=2, deltas={1, 2, 4, 5}) == DELTAS[:4]
    assert chosen(MINE, deltas={1, 2, 3, 4, 5}) == MINE[1:4]
    assert choose_deltas(DELTAS, DIGESTS, keep=2, deltas={1, 2, 3, 4, 5}) == [DELTAS[0]]
    assert choose_deltas(DELTAS, DIGESTS, keep=2, deltas=()) == DELTAS


def test_deltas_of_orphans_and_drafts_go_once_their_number_is_committed() -> None:
    names = [
        f"{ahead}v{n}-ffffffffffff.delta{end}" for n in (5, 6) for ahead, end in (("", ""), (".tmp-", "-0a1b2c3d4e5f"))
    ]
    assert choose_deltas([*names, "notes"], DIGESTS, keep=9, deltas={1, 2, 3, 4, 5}) == sorted(names[:2])


def test_a_draft_of_a_delta_that_is_needed_goes_and_the_delta_stays() -> None:
    """Named by the writer itself, so that the two agree on what a draft is."""
    drafts = [durable.draft_of(Path(name)).name for name in DELTAS]
    assert choose_deltas([*DELTAS, *drafts], DIGESTS, keep=9, deltas={1, 2, 3, 4, 5}) == sorted([DELTAS[0], *drafts])


def test_collect_removes_deltas_from_disk(tmp_path: Path) -> None:
    (tmp_path / "deltas").mkdir()
    for name in MINE:
        (tmp_path / name).mkdir()
        (tmp_path / "deltas" / f"{name}.delta").write_text("x")
    assert collect(tmp_path, DIGESTS, keep=2, serving=(), deltas={2, 4, 5}) == [MINE[1], MINE[2]]
    assert sorted(path.name for path in (tmp_path / "deltas").iterdir()) == DELTAS[4:]


def test_the_base_of_an_adapter_stays(tmp_path: Path) -> None:
    for name in MINE:
        (tmp_path / name).mkdir()
    (tmp_path / MINE[5] / "training.json").write_text(json.dumps({"step": 3, "lora": {"base": MINE[2]}}))
    (tmp_path / MINE[4] / "training.json").write_text("damaged")
    assert collect(tmp_path, DIGESTS, keep=2, serving=()) == [MINE[1], MINE[3]]
