"""The page and the summary behind it, from a whole world."""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.consumers.audit import audit
from millrace.consumers.audit.law import AuditReport
from millrace.consumers.tell.charts import Chart, draw
from millrace.consumers.tell.command import report_in
from millrace.consumers.tell.faults import changes, silences
from millrace.consumers.tell.notation import duration, short_name, spans
from millrace.consumers.tell.pages import report_page
from millrace.consumers.tell.summary import PolicyRecords, Summary, read, summary, summary_of
from tests.support.history import History
from tests.support.history_log import NS, SECOND
from tests.support.history_records import POLICY


@cache
def world() -> History:
    return History(0, versions=14)


@cache
def found() -> Summary:
    return summary(world().bus, NS, POLICY, world().now)


@cache
def verdict() -> AuditReport:
    return audit(world().bus, NS, POLICY)


@cache
def charts() -> Mapping[str, Chart]:
    return draw(found())


@cache
def page() -> str:
    return report_page(found(), verdict())


def test_versions_and_rewards_are_those_of_the_batches() -> None:
    steps = found().steps
    assert [step.version for step in steps] == list(range(1, 15))
    ready = {row["seq"]: row for _, row in world().rows("resolutions") if row["kind"] == "ready"}
    entry = world().rows("ledger")[5][1]
    rewards = [reward for group in entry["groups"] for reward in ready[group["seq"]]["rewards"]]
    assert steps[4].reward == pytest.approx(sum(rewards) / len(rewards))
    assert steps[4].low <= steps[4].high
    low, high = found().edges or (0.0, 0.0)
    assert low == pytest.approx(sum(step.reward for step in steps[:7]) / 7)
    assert high == pytest.approx(sum(step.reward for step in steps[-7:]) / 7)


def test_counts_agree_with_the_audit() -> None:
    facts = verdict().finding("tickets").facts
    assert found().granted == facts["granted"]
    assert found().resolved["ready"] == facts["ready"]
    assert found().outstanding == facts["outstanding"]
    assert found().oldest == verdict().finding("staleness").facts["oldest"]
    assert found().flow.granted[-1] == len({row["ticket"] for _, row in world().rows("grants")})
    assert found().flow.trained[-1] == sum(step.groups for step in found().steps)


def test_the_funnel_loses_no_group() -> None:
    widths = [stage.groups for stage in found().funnel]
    assert widths == sorted(widths, reverse=True)
    for before, stage in pairwise(found().funnel):
        assert before.groups - stage.groups == sum(count for _, count in stage.left), stage.name
    rows = [row for _, row in world().rows("resolutions") if row["kind"] != "setting"]
    assert found().funnel[1].groups == len(rows)
    for said in ("granted or came unasked", "without ", " expired"):
        assert said in charts()["funnel"].svg, said


def test_a_version_names_the_tickets_of_its_groups() -> None:
    ready = {row["seq"]: row for _, row in world().rows("resolutions") if row["kind"] == "ready"}
    entry = world().rows("ledger")[5][1]
    tickets = sorted(ready[group["seq"]]["ticket"] for group in entry["groups"])
    assert list(found().steps[4].tickets) == tickets
    assert f"<td>{spans(tickets)}</td>" in page()
    assert spans([4, 5, 6, 9, 11, 12]) == "4–6, 9, 11–12"
    assert spans([]) == ""


def test_evaluations_are_told_with_what_they_came_to() -> None:
    rows = [row for _, row in world().rows("scores")]
    assert [scored.what for scored in found().evaluations] == [f"version {row['version']}" for row in rows]
    assert {scored.mean for scored in found().evaluations} == {rows[0]["mean"]}
    assert found().evaluations[0].passed == (("pass@1", 0.5), ("pass@2", 1.0))
    assert f"<td>version {rows[0]['version']}</td><td>held-out.jsonl</td>" in page()
    assert "pass@1 0.500, pass@2 1.000" in page()


def test_settings_and_reasons_are_told() -> None:
    assert found().etas == [1, 2, 1, 2], "a batch has the widest bound of its groups, old ones included"
    assert found().batches == [2, 3]
    assert ("expired", "lease ran out", 1) in found().reasons
    assert ("refine", "undecodable", 1) in found().refused


def test_every_group_size_that_was_in_force_is_told() -> None:
    later = (5, "group_size", "4", "from ticket 6")
    assert found().sizes == [found().group_size]
    assert replace(found(), group_size=2, settings=(*found().settings, later, later)).sizes == [2, 4]


def entry(version: int, time: int, members: list[str], generation: int) -> dict[str, Any]:
    ranks = [{"member": member} for member in members]
    return {"version": version, "time": time * SECOND, "ranks": ranks, "generation": generation, "leader": members[0]}


def test_a_change_of_learners_and_a_slow_version_stand_out() -> None:
    ledger = [entry(0, 0, ["a"], 0), *(entry(n, 4 * n, ["a", "b"], 1) for n in range(1, 6))]
    ledger += [entry(6, 27, ["b"], 2), entry(7, 31, ["b"], 2), entry(8, 60, ["b"], 2)]
    lost, slow = changes(ledger)
    assert (lost.version, lost.before, lost.after, lost.gap) == (6, 2, 1, 7.0)
    assert lost.what == "1 learner left, another one leads"
    assert slow.version == 8
    assert "same learners" in slow.what


def test_slots_that_fall_silent_together_are_one_silence() -> None:
    times = {slot: [n * SECOND for n in range(10)] + [n * SECOND for n in range(16, 20)] for slot in ("a/0", "b/0")}
    times["c/0"] = [n * SECOND for n in range(20)]
    (only,) = silences(times, [])
    assert only.slots == ("a/0", "b/0")
    assert only.seconds == 7.0


def test_the_start_of_a_deployment_is_no_fault() -> None:
    times = {"a/0": [0, 9 * SECOND, 10 * SECOND, 20 * SECOND]}
    ledger = [{"version": 0, "time": SECOND}, {"version": 1, "time": 9 * SECOND}]
    (only,) = silences(times, ledger)
    assert (only.since, only.until) == (10 * SECOND, 20 * SECOND)


def test_every_colour_stands_out_from_its_card() -> None:
    """By the contrast of WCAG 2: at least 3.1 to 1, in the light and in the dark."""

    def light(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    cards = re.findall(r"--card: (#\w{6})", page())
    series = [re.findall(r"--c\d: (#\w{6})", half) for half in page().partition("prefers-color-scheme")[::2]]
    assert len(cards) == 2
    for card, colours in zip(cards, series, strict=True):
        assert len(colours) == 8
        for colour in colours:
            dim, bright = sorted((light(card), light(colour)))
            assert (bright + 0.05) / (dim + 0.05) >= 3.1, colour


def test_a_chart_has_a_name_for_screen_readers_and_room_on_a_phone() -> None:
    for name, chart in charts().items():
        root = ElementTree.fromstring(chart.svg)
        assert root.get("role") == "img", name
        assert (root.get("aria-label") or "").startswith("chart: "), name
    assert "overflow-x: auto" in page()
    assert least_width(page(), 400) == 640


def least_width(html: str, window: int) -> float:
    """The least width in pixels that the page's style gives the drawing of a chart, in a window of this width."""
    style = html[html.index("<style>") : html.index("</style>")]
    least = 0.0
    for limit, rules in re.findall(r"@media \(max-width: (\d+)px\) \{(.*)\}", style):
        if window <= int(limit):
            widths = re.findall(r"svg \{[^}]*min-width: min\((\d+)px, (\d+)vw\)", rules)
            least = max([least, *(min(float(pixels), float(share) * window / 100) for pixels, share in widths)])
    everywhere = re.sub(r"@media [^{]*\{(?:[^{}]*\{[^{}]*\})*[^{}]*\}", "", style)
    assert re.search(r"figure svg \{[^}]*width: 100%", everywhere)
    assert not re.search(r"svg[^{}]*\{[^}]*(min-width|[^-]width: [^1])", everywhere), "a width that no window bounds"
    return least


@given(st.integers(320, 4000))
def test_no_drawing_is_wider_than_its_box(window: int) -> None:
    """From a tablet's width on; on a phone a chart scrolls, so that its words can be read."""
    main = min(window, 1120) - 2 * 20
    columns = max(1, (main + 14) // (440 + 14))
    box = (main - 14 * (columns - 1)) / columns - 2 * 15
    assert window <= 600 or least_width(page(), window) <= box


def test_the_page_loads_nothing_and_is_small(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    report_in(world().bus, NS, POLICY, out)
    text = out.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert len(text) < 1_000_000
    assert "<script" not in text
    outside = re.findall(r'(?:src|href|url)\s*[=(]\s*["\']?(?!#|["\']?#)([^"\')>\s]+)', text)
    assert not [link for link in outside if link.startswith(("http", "//", "data:"))], outside
    assert "@import" not in text
    assert "audit clean" in text


def test_every_chart_is_well_formed_and_follows_the_page() -> None:
    for name, chart in charts().items():
        ElementTree.fromstring(chart.svg)
        assert "var(--" in chart.svg, name
        assert not re.search(r"#0102[0-9a-f]{2}", chart.svg), name


def test_ids_of_one_chart_occur_in_no_other() -> None:
    seen: set[str] = set()
    for chart in charts().values():
        ids = set(re.findall(r' id="([^"]+)"', chart.svg))
        assert not ids & seen
        seen |= ids


def test_a_thousand_versions_stay_small() -> None:
    steps = found().steps
    many = Summary(**{**{n: getattr(found(), n) for n in Summary.__slots__}, "steps": steps * 75})
    assert len(report_page(many, verdict())) < 1_000_000


def test_what_records_say_is_escaped() -> None:
    h = world().copy()
    record, row = next((r, row) for r, row in h.rows("resolutions") if row["kind"] == "failed")
    h.rewrite(record, row | {"reason": "<script>alert(1)</script>"})
    text = report_page(summary(h.bus, NS, POLICY, h.now), audit(h.bus, NS, POLICY))
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_violations_are_shown() -> None:
    h = world().copy()
    record, event = h.rows("events")[3]
    h.rewrite(record, event | {"source_hash": b"x" * 32})
    text = report_page(found(), audit(h.bus, NS, POLICY))
    assert "audit found violations" in text
    assert f"{record.topic}[{record.partition}]@{record.offset}" in text


def test_a_policy_without_versions_has_a_page_too() -> None:
    first = read(world().bus, NS, POLICY, world().now)
    begun = PolicyRecords(NS, POLICY, first.weights[:1], first.ledger[:1], [], [], [], [], [], {}, world().now)
    text = report_page(summary_of(begun), verdict())
    assert "No version has been trained yet" in text


def test_small_words() -> None:
    assert [duration(s) for s in (3.21, 75, 7300)] == ["3.2 s", "1 min 15 s", "2 h 1 min"]
    assert short_name("learner@127.0.0.1:4521-8b1f-77aa") == "127.0.0.1:4521 (8b1f)"
    assert len(short_name("x" * 60)) < 30
    assert "Reward" in page()


def test_reasons_are_counted_whichever_samples_they_were_about() -> None:
    h = world().copy()
    for record, row in h.rows("resolutions"):
        if row["kind"] in ("failed", "expired"):
            which = "0: redacted; 1: redacted" if row["kind"] == "failed" else "1: redacted"
            h.rewrite(record, row | {"kind": "failed", "reason": which})
    assert summary(h.bus, NS, POLICY, h.now).reasons == (("failed", "redacted", 2),)
