"""Every documented question over a long history, in CPU time: `python -m benchmarks.bench_questions --steps 1000000`.

Each is divided by the time of one scan over all columns of the events, in the same run: so the numbers do not depend on
the machine, or on what else it does. Limits of these shares, at ten million steps: a trajectory by its id 0.02, what a
version trained on 0.05, which versions learned from a trajectory or a task 0.1, aggregates 0.5, any question 1.5. The
history is made by SQL, in the tables of this release: episodes of eight steps with tools, groups of eight, versions of
eight groups. `--explain` prints what a query reads."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from millrace.consumers.warehouse.open_store import make_tables
from millrace.consumers.warehouse.questions.catalog import questions, values
from millrace.consumers.warehouse.store.directory import TableDirectory
from millrace.consumers.warehouse.store.tables import VIEWS

STEPS, GROUP, BATCH, PARTS, TENANTS, TASKS = 8, 8, 8, 8, 4, 2000
CHUNK = 200_000
REPEATS = 3
LIMITS = {"trajectory": 0.02, "trained-by": 0.05, "seen-by --trajectory": 0.1, "seen-by --task": 0.1}
AGGREGATES = {"reward-by-version", "costs-by-tenant", "tool-failures", "reward-by-task", "trained-by", "compare"}
AGGREGATE, ANY = 0.5, 1.5

# Of episode i: ids rise with time, as they do in the log.
_ID = "lower(concat('{kind}-', hex(toUInt64(1700000000000 + {i} * 37)), hex(cityHash64({i}, '{kind}'))))"
_IDS = "arrayMap(k -> toInt32(exp((cityHash64(n, k, {salt}) % 10000) / 964)), range({count}))"
_LOGPROBS = "arrayMap(k -> toFloat32(-exp((cityHash64(n, k, 3) % 10000) / 1000 - 9)), range({count}))"


def _id(kind: str, i: str) -> str:
    return _ID.format(kind=kind, i=i)


def _at(micros: str) -> str:
    return f"fromUnixTimestamp64Micro(toInt64(1700000000000000 + {micros}), 'UTC')"


def _columns(**columns: str) -> str:
    """As INSERT lists them, with the values behind."""
    names = ", ".join(f"`{name.replace('__', '.')}`" for name in columns)
    return f"({names}) SELECT {', '.join(columns.values())}"


def _common(topic: str, part: str, off: str, micros: str) -> dict[str, str]:
    at = f"fromUnixTimestamp64Milli(toInt64(1700000000000 + intDiv({micros}, 1000)), 'UTC')"
    return {"topic": f"'bench.{topic}'", "part": part, "off": off, "logged": at, "policy": "'sort'"}


def events() -> str:
    """One row a step n; i is its episode, g its group, k what kind of step it is."""
    call = "k IN (1, 4)"
    text = "concat('{\"model\": \"sort\", \"messages\": [', toString(cityHash64(n)), repeat(' some words', 12), ']}')"
    source = " FROM (SELECT number AS n, intDiv(n, 8) AS i, intDiv(n, 64) AS g, toInt32(n % 8) AS k FROM {numbers})"
    return _columns(
        **_common("events", "g % 8", "n", "n * 4000"),
        id=_id("event", "n"), tenant=f"concat('tenant-', toString(g % {TENANTS}))", group="toString(g)",
        kind="arrayElement(['episode_started', 'model_call', 'tool_call', 'tool_result', 'model_call', 'observation',"
        " 'episode_ended', 'reward'], k + 1)",
        root_trajectory=_id("tr", "i"), trajectory=_id("tr", "i"), attempt=_id("at", "i"), step="k", split="'train'",
        event_time=_at("n * 4000"), log_time=_at("n * 4000 + 900"), hash=f"if({call}, reverse(hex(cityHash64(n))), '')",
        episode_started_ticket="if(k = 0, g, NULL)", episode_started_task_id="if(k = 0, toString(g % 2000), '')",
        model_call_engine=f"if({call}, 'vllm', '')",
        model_call_engine_incarnation=f"if({call}, concat('engine-', toString(i % 2)), '')",
        model_call_call_id=f"if({call}, {_id('call', 'n')}, '')",
        model_call_request=f"if({call}, {text}, '')", model_call_response=f"if({call}, {text}, '')",
        model_call_prompt_ids=f"if({call}, {_IDS.format(salt=1, count=40)}, [])",
        model_call_output_ids=f"if({call}, {_IDS.format(salt=2, count=24)}, [])",
        model_call_output_logprobs=f"if({call}, {_LOGPROBS.format(count=24)}, [])",
        model_call_output_versions=f"if({call}, arrayResize([toInt32(0)], 24, toInt32(intDiv(g, {BATCH}))), [])",
        model_call_usage_prompt="if(k IN (1, 4), 40, 0)", model_call_usage_completion="if(k IN (1, 4), 24, 0)",
        model_call_latency_us="if(k IN (1, 4), 1000 + cityHash64(n) % 100000, 0)", model_call_trainable=call,
        tool_call_call_id=f"if(k = 2, {_id('tool', 'i')}, '')", tool_call_name="if(k = 2, 'search', '')",
        tool_result_call_id=f"if(k = 3, {_id('tool', 'i')}, '')", tool_result_name="if(k = 3, 'search', '')",
        tool_result_status="if(k = 3 AND i % 9 = 0, 'error', 'ok')", tool_result_latency_us="if(k = 3, i % 5000, 0)",
        observation_content=f"if(k = 5, {text}, '')",
        reward_reward_id=f"if(k = 7, {_id('rw', 'i')}, '')", reward_source="if(k = 7, 'verifier', '')",
        reward_value="if(k = 7, toFloat64(cityHash64(i) % 2), NULL)",
    ) + source  # fmt: skip


def trajectories() -> str:
    """One row an episode n of group g."""
    versions = f"arrayResize([toInt32(0)], 128, toInt32(intDiv(g, {BATCH})))"
    return _columns(
        **_common("sort.trajectories", "g % 8", f"intDiv(g, {PARTS}) * {GROUP} + n % {GROUP}", "n * 32000"),
        id=_id("tr", "n"), tenant=f"concat('tenant-', toString(g % {TENANTS}))", group="toString(g)", ticket="g",
        sample=f"n % {GROUP}", attempt=_id("at", "n"), task_id=f"concat('task-', toString(g % {TASKS}), '@1')",
        split="'train'", status="'success'", reward="toFloat64(cityHash64(n) % 2)", tokens="48", length="128",
        rewards__reward_id=f"[{_id('rw', 'n')}]", rewards__source="['verifier']", rewards__rubric_version="['1']",
        rewards__value="[toFloat64(cityHash64(n) % 2)]", rewards__failure="[NULL]",
        lineages__id=f"[{_id('ln', 'n')}]", lineages__tokens=f"[{_IDS.format(salt=1, count=128)}]",
        lineages__mask="[arrayMap(k -> toUInt8(k % 64 >= 40), range(128))]",
        lineages__logprobs=f"[{_LOGPROBS.format(count=128)}]", lineages__versions=f"[{versions}]",
        lineages__calls="[['a', 'b']]", v_head=f"intDiv(g, {BATCH})", v_tail=f"intDiv(g, {BATCH})",
        events__topic="['bench.events', 'bench.events']", events__partition="[g % 8, g % 8]",
        events__offset="[n * 8 + 1, n * 8 + 4]", sealed_at=_at("n * 32000 + 40000"),
    ) + f" FROM (SELECT number AS n, intDiv(n, {GROUP}) AS g FROM {{numbers}})"  # fmt: skip


def groups() -> dict[str, str]:
    """One row a group n, in three tables."""
    source = " FROM (SELECT number AS n FROM {numbers})"
    shared = {"policy": "'sort'", "ticket": "n"}
    common = {**_common("sort.x", "0", "n", "n * 256000"), **shared}
    offsets = f"arrayMap(s -> toInt64(intDiv(n, {PARTS}) * {GROUP} + s), range({GROUP}))"
    return {
        "grants": _columns(**common, prompt_id="toString(n)", time=_at("n * 256000 - 900000")) + source,
        "completions": _columns(**common, kind="'complete'", group="toString(n)", time=_at("n * 256000 + 400000"))
        + source,
        "resolutions": _columns(
            **common, seq="n", kind="'ready'", group="toString(n)", prompt_id="toString(n)", solicited="true",
            size=f"{GROUP}", rewards="arrayMap(s -> toFloat64((n + s) % 2), range(8))", time=_at("n * 256000 + 500000"),
            trajectories__topic=f"arrayResize(['bench.sort.trajectories'], {GROUP}, 'bench.sort.trajectories')",
            trajectories__partition=f"arrayResize([toInt32(n % {PARTS})], {GROUP}, toInt32(n % {PARTS}))",
            trajectories__offset=offsets,
        ) + source,
    }  # fmt: skip


def ledger() -> str:
    """One row a version n."""
    each = f"range(toUInt64((n) * {BATCH}), toUInt64((n + 1) * {BATCH}))"
    places = (
        f"arrayMap(g -> arrayMap(s -> ('bench.sort.trajectories', toInt32(g % {PARTS}),"
        f" toInt64(intDiv(g, {PARTS}) * {GROUP} + s)), range({GROUP})), {each})"
    )
    return _columns(
        **_common("sort.ledger", "0", "n", f"n * 256000 * {BATCH}"), version="n + 1", time=_at(f"n * 256000 * {BATCH}"),
        groups__seq=f"arrayMap(g -> toInt64(g), {each})", groups__ticket=f"arrayMap(g -> toInt64(g), {each})",
        groups__group=f"arrayMap(g -> toString(g), {each})", groups__trajectories=places,
        groups__lost=f"arrayMap(g -> NULL, {each})", groups__cell=f"arrayMap(g -> toInt32(0), {each})",
    ) + " FROM (SELECT number AS n FROM {numbers})"  # fmt: skip


def fill(store: TableDirectory, steps: int) -> None:
    """The history of so many steps, in the order of its writing."""
    episodes = steps // STEPS
    counts = {
        "events": (events(), steps), "trajectories": (trajectories(), episodes),
        **{name: (sql, episodes // GROUP) for name, sql in groups().items()},
        "ledger": (ledger(), episodes // GROUP // BATCH),
    }  # fmt: skip
    for name, (sql, count) in counts.items():
        for first in range(0, count, CHUNK):
            numbers = f"numbers({first}, {min(CHUNK, count - first)})"
            said = sql.replace("{numbers}", numbers)
            store.run(f"INSERT INTO millrace_log.{name} {said} SETTINGS max_insert_threads = 1, max_threads = 2")
        print(f"{count} rows of {name}", flush=True)


def seconds(store: TableDirectory, sql: str, parameters: dict[str, str]) -> float:
    """CPU seconds of a query, the least of some."""
    best = float("inf")
    for _ in range(REPEATS):
        with store.client(VIEWS) as client:
            started = time.process_time()
            client.query(f"{sql} SETTINGS use_query_condition_cache = 0", parameters=parameters)
            best = min(best, time.process_time() - started)
    return best


def asked(store: TableDirectory) -> dict[str, tuple[str, dict[str, str]]]:
    """Every question with parameters from the middle of history."""
    ((trajectory, task, version),) = store.rows(
        "SELECT t.id, replaceRegexpOne(t.task_id, '@[0-9]+$', ''), (SELECT intDiv(max(version), 2) FROM ledger)"
        " FROM trajectories AS t WHERE v_tail = (SELECT intDiv(max(version), 2) FROM ledger) LIMIT 1"
    )
    given = {"policy": "sort", "trajectory": trajectory, "version": str(version), "a": str(version), "b": "1"}
    found = {}
    for name, each in questions().items():
        own = {p.name: given[p.name] for p in each.parameters if p.name in given and p.default is None}
        found[name] = each.sql, values(each, own)
    for key, value in (("trajectory", trajectory), ("task", task)):
        each = questions()["seen-by"]
        found[f"seen-by --{key}"] = each.sql, values(each, {"policy": "sort", key: value})
    return found


def joins(store: TableDirectory) -> float:
    """Of how many joins by place the CPU time is that of one join by id: trajectories with themselves."""
    taken = []
    for key in ("topic, part, off", "id"):
        log = "millrace_log.trajectories"
        sql = f"SELECT sum(t.tokens) FROM (SELECT {key} FROM {log}) AS s INNER JOIN {log} AS t USING ({key})"
        taken.append(seconds(store, sql, {}))
    return taken[1] / taken[0]


def main() -> None:
    """Prints each share and its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000, help="events of the history")
    parser.add_argument("--home", default=None, help="where the tables lie meanwhile")
    parser.add_argument("--explain", action="store_true", help="print what each question reads")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=options.home) as folder,
        TableDirectory(Path(folder) / "w", memory_mb=4096) as store,
    ):
        make_tables(store)
        fill(store, options.steps)
        store.run("SYSTEM STOP MERGES")
        ((size,),) = store.rows(
            "SELECT sum(bytes_on_disk) FROM system.parts WHERE active AND database = 'millrace_log'"
        )
        whole = seconds(store, "SELECT sum(cityHash64(*)) FROM millrace_log.events", {})
        print(f"{options.steps} steps, {size / options.steps:.0f} bytes each; a scan of all columns {whole:.2f} CPU s")
        for name, (sql, parameters) in asked(store).items():
            if options.explain:
                plan = store.rows(f"EXPLAIN indexes = 1 {sql}", parameters, VIEWS)
                print("\n".join(line for (line,) in plan if "ranules" in line or "ReadFrom" in line))
            share = seconds(store, sql, parameters) / whole
            limit = LIMITS.get(name, AGGREGATE if name in AGGREGATES else ANY)
            print(f"{name}: {share:.3f} of a scan (limit {limit}){' MISSED' if share > limit else ''}", flush=True)
        print(f"joining by place: {joins(store):.1f} times as fast as by id")


if __name__ == "__main__":
    main()
