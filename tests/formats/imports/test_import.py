"""Files into a world of production stages: sealed, rewarded and governed like anything else, once however often they
are imported, and clean in the audit."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.formats.imports import ImportOptions, ImportSummary, import_into
from millrace.formats.imports import run as importing
from millrace.infra import faults
from millrace.infra.config import Governance
from millrace.infra.errors import ImportRefused
from millrace.infra.log.blobs import ClaimStore
from millrace.streams.refine.stage import Refine
from millrace.streams.seal.stage import Seal
from millrace.testing.world import CALM, World
from tests.support.imported import ASKED, ROWS, SAYS, TALK, write
from tests.support.whole import NAMESPACE, POLICY, Planted, whole

TOPICS = {"raw": 2, "events": 2, "dead-letters": 2, "decisions": 1}
OWN = {f"{POLICY}.trajectories": 2, f"{POLICY}.evaluations": 2, f"{POLICY}.completions": 1}


LATER = 3_600_000_000
"""micros after which seal has given up whatever began and did not end"""


class Died(BaseException):
    """What a kill is here."""


def small(seed: int = 0, reward_key: str = "") -> World:
    """Refine and seal alone."""
    stages = [
        lambda: Refine(Governance(), [Planted()], slots=2, name_key=b"names", reward_key=reward_key),
        lambda: Seal([POLICY]),
    ]
    return World(seed, TOPICS | OWN, stages, workers=1, chances=CALM)


def brought(world: World, *paths: Path, reward_key: str = "", **options: Any) -> list[ImportSummary]:
    return import_into(world.bus, NAMESPACE, POLICY, paths, ImportOptions(**options), reward_key=reward_key)


def events(world: World) -> list[dict[str, Any]]:
    return [event for event in world.decoded("events") if "kind" in event]


def told(world: World) -> list[Any]:
    """What every event and sample says, without when refine took it and where it lies."""
    own = ("log_time", "source_place", "prev_hash", "hash", "sealed_at", "events")
    records = [*events(world), *world.decoded(f"{POLICY}.trajectories"), *world.decoded(f"{POLICY}.evaluations")]
    left = [{name: value for name, value in one.items() if name not in own} for one in records]
    return sorted(left, key=lambda one: one["id"])


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return [write(tmp_path / name, rows) for name, rows in ROWS.items()]


def test_every_layout_is_governed_and_sealed_and_trains_nothing(files: list[Path]) -> None:
    with small() as world:
        done = brought(world, *files)
        world.drain()
        assert world.decoded("dead-letters") == []
        samples = [*world.decoded(f"{POLICY}.trajectories"), *world.decoded(f"{POLICY}.evaluations")]
        assert len(samples) == sum(one.trajectories for one in done) == len(files) + 3
        for sample in samples:
            assert (sample["lineages"], sample["tokens"], sample["v_head"]) == ([], 0, -1)
            assert {reason.partition(":")[2] for reason in sample["excluded"]} == {"imported"}
            assert sample["reward"] in (0.75, 0.25, 1.0, 0.0)
        assert not [one for one in world.decoded(f"{POLICY}.completions") if one["kind"] != "progress"]
        assert {event["governance"]["reason"] for event in events(world)} == {"tenant:local"}
        assert all(one.sent for one in done)
        world.verify()


def test_what_is_imported_again_changes_nothing(files: list[Path], tmp_path: Path) -> None:
    with small() as world:
        first = brought(world, *files)
        world.drain()
        before = told(world)
        copy = tmp_path / "elsewhere.jsonl"
        copy.write_text("\n" + json.dumps(orjson.loads(files[0].read_bytes())))
        again = brought(world, copy, *files[1:])
        world.drain()
        assert [one.name for one in again] == [one.name for one in first], "the rows are the same, wherever they lie"
        assert told(world) == before
        other = brought(world, files[0], tenant="acme")
        world.drain()
        assert other[0].name != first[0].name
        assert {event["governance"]["eligibility"] for event in events(world) if event["tenant"] == "acme"} == {
            "audit_only"
        }


def test_secrets_are_taken_out_and_evaluation_stays_evaluation(tmp_path: Path) -> None:
    rows = [
        {"messages": [*ASKED, {"role": "assistant", "content": "the word is secret-17"}]},
        {"messages": TALK, "split": "evaluation"},
    ]
    with small() as world:
        brought(world, write(tmp_path / "rows", rows))
        world.drain()
        assert b"secret-17" not in b"".join(event["body"] for event in events(world))
        assert len(world.decoded(f"{POLICY}.evaluations")) == len(world.decoded(f"{POLICY}.trajectories")) == 1


def test_rewards_are_signed_where_refine_asks_for_it(files: list[Path]) -> None:
    with small(reward_key="word") as world:
        brought(world, files[0], reward_key="word")
        world.drain()
        assert world.decoded("dead-letters") == []
        (sample,) = world.decoded(f"{POLICY}.trajectories")
        assert sample["reward"] == 0.75


def test_nothing_is_sent_of_files_with_a_bad_row_unless_it_is_skipped(tmp_path: Path) -> None:
    good = write(tmp_path / "good.jsonl", [{"messages": TALK}] * 3)
    bad = write(tmp_path / "bad.jsonl", [{"messages": TALK}, *[b"no json"] * 7, {"messages": TALK}])
    listed = tmp_path / "refused.jsonl"
    with small() as world:
        with pytest.raises(ImportRefused) as raised:
            brought(world, good, bad, refusal_file=listed)
        assert "7 rows cannot be imported, so nothing was" in str(raised.value)
        assert f"{bad}:2: not_json" in str(raised.value)
        assert "and 2 more" in str(raised.value)
        assert world.decoded("raw") == []
        lines = [orjson.loads(line) for line in listed.read_bytes().splitlines()]
        assert [(line["row"], line["reason"]) for line in lines] == [(row, "not_json") for row in range(2, 9)]
        assert listed.stat().st_mode & 0o077 == 0
        dry = brought(world, good, bad, dry_run=True)
        assert [one.sent for one in dry] == [False, False]
        assert world.decoded("raw") == []
        done = brought(world, good, bad, skip=True)
        assert [(one.trajectories, one.refused) for one in done] == [(3, {}), (2, {"not_json": 7})]
        assert [{**one.as_json(), "sent": True} for one in dry] == [one.as_json() for one in done]
        world.drain()
        assert len(world.decoded(f"{POLICY}.trajectories")) == 5


def test_a_file_that_changes_meanwhile_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "rows", [{"messages": TALK}])

    def grows(at: str, name: str) -> None:
        if name == at:
            write(path, [{"messages": TALK}] * 2)

    for at, words, sent in (("import.checked", "nothing of it was imported", 0), ("import.committed", "neither", 6)):
        with small() as world:
            before = faults.install(partial(grows, at))
            try:
                with pytest.raises(ImportRefused, match=words):
                    brought(world, path)
            finally:
                faults.install(before)
            assert (len(world.decoded("raw")) > 0) == (sent > 0)
        write(path, [{"messages": TALK}])


def test_a_second_import_of_the_same_rows_fences_the_first(tmp_path: Path) -> None:
    path = write(tmp_path / "rows", [{"messages": TALK}])
    with small() as world:

        def hook(name: str) -> None:
            if name == "import.written":
                faults.install(None)
                brought(world, path)

        before = faults.install(hook)
        try:
            with pytest.raises(ImportRefused, match="by another process"):
                brought(world, path)
        finally:
            faults.install(before)
        world.drain()
        assert len(world.decoded(f"{POLICY}.trajectories")) == 1


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "rows", [{"messages": TALK}])
    for place, words in ((path, "there already"), (tmp_path / "gone" / "refused", "no folder")):
        with pytest.raises(ImportRefused, match=words):
            import_into(None, NAMESPACE, POLICY, [path], ImportOptions(refusal_file=place))
    assert orjson.loads(path.read_bytes()) == {"messages": TALK}
    with pytest.raises(ImportRefused, match="no name of a tenant"):
        import_into(None, NAMESPACE, POLICY, [path], ImportOptions(tenant="a/b"))


def test_what_is_too_large_for_a_record_is_claimed(tmp_path: Path) -> None:
    path = write(tmp_path / "rows", [{"messages": [{"role": "user", "content": "x" * 3_000_000}, SAYS]}])
    with small() as world:
        claims = ClaimStore(str(tmp_path / "claims"))
        import_into(world.bus, NAMESPACE, POLICY, [path], ImportOptions(), claims=claims)
        sizes = [
            len(record.value or b"")
            for partition in range(2)
            for record in world.bus.read(f"{NAMESPACE}.raw", partition)
        ]
        assert max(sizes) < 1_000_000
        assert len(sizes) == 3
        assert [one for one in (tmp_path / "claims").rglob("*") if one.is_file()]


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    deaths=st.lists(st.tuples(st.integers(1, 60), st.booleans()), max_size=4),
    size=st.integers(1, 30),
    seed=st.integers(0, 1 << 20),
)
def test_an_import_that_dies_anywhere_loses_and_doubles_nothing(
    deaths: list[tuple[int, bool]], size: int, seed: int, tmp_path: Path
) -> None:
    """It dies at any point of any of its runs, whatever transactions hold and whatever the stages did meanwhile."""
    rows = [{"messages": TALK, "reward": n / 8} for n in range(4)]
    rows.append({"messages": TALK, "reward": 1.0})
    path = write(tmp_path / "rows", rows)
    pairs = write(tmp_path / "pairs", ROWS["trl-preference"])
    size_before, importing.RECORDS = importing.RECORDS, size
    try:
        with small(seed) as world:
            for nth, stages_go_on in deaths:
                with _dying(nth):
                    brought(world, path, pairs)
                if stages_go_on:
                    world.drain()
                    world.advance(LATER)
                    world.drain()
            brought(world, path, pairs)
            world.drain()
            found = told(world)
            assert world.decoded("dead-letters") == []
        with small(seed) as world:
            brought(world, path, pairs)
            world.drain()
            assert found == told(world)
    finally:
        importing.RECORDS = size_before


class _dying:
    """Raises Died at the nth point of an import, and takes it."""

    def __init__(self, nth: int) -> None:
        self._left = nth

    def __enter__(self) -> None:
        self._before = faults.install(self._hook)

    def __exit__(self, kind: object, error: object, at: object) -> bool:
        faults.install(self._before)
        return kind is Died

    def _hook(self, name: str) -> None:
        if name.startswith("import."):
            self._left -= 1
            if self._left == 0:
                raise Died


@pytest.mark.parametrize("seed", range(3))
def test_the_audit_of_a_history_with_imports_is_clean(seed: int, tmp_path: Path) -> None:
    files = [write(tmp_path / name, rows) for name, rows in ROWS.items()]
    done: list[list[ImportSummary]] = []

    def later(world: World) -> None:
        for _ in range(2):
            done.append(brought(world, *files))
            world.drain()

    made = whole(seed, 40, later=later)
    assert len([row for _, row in made.rows("events") if row["source"].startswith("import-")]) == sum(
        sum(one.events.values()) for one in done[0]
    )
    report = made.audit()
    assert report.clean, report.violations[:3]
    assert {"times", "episodes", "dispositions", "capture-chain"} <= {finding.law for finding in report.findings}
