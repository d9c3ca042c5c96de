"""An export is whole or not there, and asks governance of then and of today."""

from __future__ import annotations

import os
import signal
import stat
import textwrap
import tracemalloc
from contextlib import suppress
from pathlib import Path

import orjson
import pytest

from millrace.consumers.clearance import today
from millrace.consumers.replay.selection import Selector
from millrace.formats.clearance import anyone
from millrace.formats.exports import export_from
from millrace.formats.exports.select import Selection, VersionRange
from millrace.formats.layouts import WRITERS
from millrace.infra import durable
from millrace.infra.config import load
from millrace.infra.errors import ExportError
from millrace.infra.log.history.reader import History
from tests.support.conversations import Conversations
from tests.support.history_log import NS
from tests.support.history_records import POLICY

WORLD = Conversations(1)


def history(source: Conversations = WORLD) -> History:
    return History(source.bus, NS, POLICY)


def test_what_lies_there_already_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ExportError, match="there already"):
        export_from(history(), "jsonl", tmp_path / "out", Selection(), "local")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("out", "mine")]


@pytest.mark.parametrize(("layout", "folder"), [("no-such", ""), ("jsonl", "gone")])
def test_what_makes_no_sense_is_refused_before_anything_is_written(layout: str, folder: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="choose"):
        export_from(history(), layout, tmp_path / folder / "out", Selection(), "local")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["jsonl", "parquet", "hf"])
def test_an_export_that_fails_leaves_nothing(name: str, tmp_path: Path) -> None:
    def fails(done: int, total: int) -> None:
        raise OSError(28, "no room")

    with pytest.raises(OSError, match="no room"):
        export_from(history(), name, tmp_path / "out", Selection(), "nobody", watch=fails)
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_is_for_its_owner_alone(tmp_path: Path) -> None:
    for name, layout in WRITERS.items():
        export_from(history(), name, tmp_path / name, Selection(), "local")
        mode = stat.S_IMODE((tmp_path / name).stat().st_mode)
        assert mode == (0o700 if layout.form == "dataset" else 0o600), name


KILLED = """
    import os, signal
    from pathlib import Path
    left = int(os.environ["STEP"])
    def counted(function):
        def step(*args, **kwargs):
            global left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return step
    from tests.formats.exports.test_run import history
    from millrace.formats.exports import export_from
    from millrace.formats.exports.select import Selection
    os.fsync, Path.rename = counted(os.fsync), counted(Path.rename)
    export_from(history(), "parquet", Path("out"), Selection(), os.environ["OWNER"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("owner", ["local", "nobody"])
def test_killed_at_any_sync_or_rename_it_is_whole_or_not_there(owner: str, tmp_path: Path) -> None:
    whole = export_from(history(), "parquet", tmp_path / "whole", Selection(), owner)
    seen: set[bool] = set()
    for step in range(1, 40):
        folder = tmp_path / str(step)
        folder.mkdir()
        pid = os.fork()
        if pid == 0:  # a program of its own, that shares what is loaded
            try:
                os.chdir(folder)
                os.environ |= {"STEP": str(step), "OWNER": owner}
                exec(compile(textwrap.dedent(KILLED), "<killed>", "exec"), {"__name__": "killed"})
            finally:
                os._exit(0)
        _, status = os.waitpid(pid, 0)
        there = (folder / "out").exists()
        seen.add(there)
        if there:
            manifest = orjson.loads((folder / "out.manifest.json").read_bytes())
            assert manifest == {**whole.as_json(), "file": "out"}
            assert (folder / "out").read_bytes() == (tmp_path / "whole").read_bytes()
            assert (folder / "out.refused.jsonl").exists() == bool(whole.refused)
        if not os.WIFSIGNALED(status):
            assert there
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    assert seen == {True, False}
    assert step > 5


def test_the_rules_of_today_can_only_take_permission_away(tmp_path: Path) -> None:
    clear = WORLD.copy()
    for record, event in clear.rows("events"):
        clear.govern(record, event, eligibility="aggregate")
    for number, (rule, leaves) in enumerate(
        [("aggregate", True), ("tenant_only", False), ("audit_only", False), ("denied", False)]
    ):
        flags = {"policy.name": POLICY, "governance.tenants.local.eligibility": rule}
        allowed = today(load(flags=flags))
        summary = export_from(history(clear), "jsonl", tmp_path / str(number), Selection(), "", allowed)
        assert (summary.exported > 0) == leaves, rule
        assert summary.refused == ({} if leaves else {"ineligible": summary.read})
    barred = WORLD.copy()
    for record, event in barred.rows("events"):
        barred.govern(record, event, eligibility="denied")
    allowed = today(load(flags={"policy.name": POLICY}))
    assert export_from(history(barred), "jsonl", tmp_path / "b", Selection(), "", allowed).exported == 0


def test_evaluation_traffic_leaves_only_when_it_is_asked_for(tmp_path: Path) -> None:
    (_, sample), *_ = WORLD.rows("evaluations")
    assert sample["id"] not in _written("without", Selection(), tmp_path)
    only = _written("only", Selection(evaluation=True, train=False), tmp_path)
    assert sample["id"] in only
    assert len(only) == len(WORLD.rows("evaluations"))
    assert sample["id"] in _written("both", Selection(evaluation=True), tmp_path)


def _written(name: str, selection: Selection, folder: Path) -> set[str]:
    export_from(history(), "jsonl", folder / name, selection, "local")
    return {orjson.loads(line)["trajectory"] for line in (folder / name).read_bytes().splitlines()}


def test_groups_of_two_tenants_with_one_name_are_two_groups(tmp_path: Path) -> None:
    clear = WORLD.copy()
    for record, event in clear.rows("events"):
        clear.govern(record, event, eligibility="aggregate")
    for record, row in clear.rows("trajectories"):
        clear.rewrite(record, {**row, "tenant": f"tenant-{row['sample']}"})
    summary = export_from(history(clear), "atropos", tmp_path / "out", Selection(), "")
    assert summary.rows == summary.exported == summary.read


def test_what_cannot_be_read_is_counted_and_ends_nothing(tmp_path: Path) -> None:
    copy = WORLD.copy()
    record, _ = copy.rows("trajectories")[3]
    copy.rewrite(record, b"no record of ours")
    summary = export_from(history(copy), "atropos", tmp_path / "out", Selection(), "local")
    assert summary.refused == {"unreadable": 1}
    assert summary.read == len(WORLD.rows("trajectories")) == summary.exported + 1


@pytest.mark.slow
def test_memory_does_not_grow_with_the_history(tmp_path: Path) -> None:
    peaks = []
    for versions in (4, 40):
        source = history(Conversations(1, versions))
        export_from(source, "jsonl", tmp_path / f"warm-{versions}", Selection(), "local")
        tracemalloc.start()
        summary = export_from(source, "jsonl", tmp_path / str(versions), Selection(), "local")
        peaks.append((summary.exported, tracemalloc.get_traced_memory()[1]))
        tracemalloc.stop()
    (few, small), (many, large) = peaks
    assert many > 6 * few
    assert large < 2.5 * small, peaks


def test_a_draft_becomes_the_file_or_goes(tmp_path: Path) -> None:
    with durable.drafting(tmp_path / "file") as draft:
        draft.write_text("whole")
        assert not (tmp_path / "file").exists()
    assert (tmp_path / "file").read_text() == "whole"
    with pytest.raises(FileExistsError), durable.drafting(tmp_path / "file") as draft:
        draft.write_text("other")
    with suppress(ValueError), durable.drafting(tmp_path / "folder") as draft:
        draft.mkdir()
        (draft / "inside").write_text("x")
        raise ValueError
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": "whole"}


@pytest.mark.parametrize(("kind", "reason"), [("reward", "unreadable"), ("Progress", "events_gone")])
def test_a_trajectory_that_names_what_is_no_call_is_refused_alone(kind: str, reason: str, tmp_path: Path) -> None:
    made = WORLD.copy()
    before = export_from(history(made), "jsonl", tmp_path / "before", Selection(), "local")
    record, sample = made.rows("trajectories")[0]
    if kind == "Progress":
        place = made.append("events", "Progress", {"stage": "refine", "slot": 0, "time": 0}, "progress/0")
    else:
        place = next(one.place for one, event in made.rows("events") if event["kind"] == kind)
    named = [*sample["events"], {"topic": place.topic, "partition": place.partition, "offset": place.offset}]
    made.rewrite(record, {**sample, "events": named})
    after = export_from(history(made), "jsonl", tmp_path / "after", Selection(), "local")
    assert after.exported == before.exported - 1
    assert after.refused == {**before.refused, reason: before.refused.get(reason, 0) + 1}
    there = [one.id for one in Selector(history(made), anyone, "local", None).by_rule(lambda _: True).candidates]
    assert sample["id"] not in there
    assert there


@pytest.mark.parametrize("versions", [VersionRange(1, 2), VersionRange(3, None), VersionRange(90, 99)])
def test_an_export_of_named_versions_reads_what_the_ledger_places_alone(versions: VersionRange, tmp_path: Path) -> None:
    clear = WORLD.copy()
    for record, event in clear.rows("events"):
        clear.govern(record, event, eligibility="aggregate")
    summary = export_from(history(clear), "jsonl", tmp_path / "out", Selection(trained=versions), "")
    places = {
        (place["partition"], place["offset"])
        for _, entry in clear.rows("ledger")
        for group in entry["groups"]
        for place in group["trajectories"]
        if group["lost"] is None and versions.holds(entry["version"])
    }
    named = {row["id"] for record, row in clear.rows("trajectories") if (record.partition, record.offset) in places}
    rows = [orjson.loads(line) for line in (tmp_path / "out").read_bytes().splitlines()]
    assert {row["trajectory"] for row in rows} == named
    assert summary.read == len(named) < len(clear.rows("trajectories"))
    assert summary.left_out == {}
