"""Which file begins when, where several processes share a run: the longest first, so that none waits at the end for one
that began last; and tests that use the one real vLLM server in one process, so that it starts once, as those that have
SGLang in their names.

A plugin of the run itself: the process that hands out the files asks it, and each that runs them."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

ENGINE = (
    "tests/infra/engines/test_conformance.py",
    "tests/infra/engines/test_vllm_launch.py",
    "tests/consumers/reloader/test_engine_broadcast.py",
    "tests/consumers/reloader/test_real_engines.py",
    "tests/consumers/reloader/test_interruption.py",
    "tests/consumers/reloader/test_adapters.py",
    "tests/consumers/reloader/test_process.py",
    "tests/consumers/reloader/test_process_broadcast.py",
    "tests/producers/test_byte_for_byte.py",
    "tests/dialects/test_messages_engine.py",
    "tests/producers/gateway/test_held_replies_engine.py",
)
"""every file whose tests ask for the fixture `vllm`"""
LONGEST = (
    "tests/chaos/test_elements.py",
    *ENGINE,
    "tests/docs/test_deployment.py",
    "tests/docs/test_benchmarks.py",
    "tests/chaos/test_ways.py",
    "tests/chaos/test_kill_points.py",
    "tests/producers/gateway/calls/test_real_fleet.py",
    "tests/consumers/learner/group/test_group.py",
    "tests/infra/log/test_kafka_mend.py",
    "tests/infra/machine/test_supervisor.py",
    "tests/consumers/warehouse/test_rebuild_killed.py",
    "tests/consumers/test_kills.py",
    "tests/consumers/learner/test_learner.py",
    "tests/benchmarks/test_rl_in_process.py",
    "tests/infra/stages/test_processes.py",
    "tests/conformance/test_conformance_of_backends.py",
    "tests/consumers/warehouse/test_server_mode.py",
    "tests/chaos/test_starting.py",
    "tests/consumers/warehouse/ingest/test_ingest.py",
    "tests/infra/log/test_kafka_alive.py",
    "tests/test_misspelt.py",
    "tests/conformance/test_roles_apart.py",
    "tests/consumers/replay/prove/test_prover_ranks.py",
    "tests/consumers/replay/branch/test_run.py",
    "tests/trainers/backends/deepspeed/test_backend.py",
    "tests/consumers/warehouse/test_kills.py",
    "tests/consumers/replay/prove/test_prover.py",
    "tests/trainers/backends/test_ranks.py",
    "tests/infra/machine/test_guarded.py",
    "tests/trainers/backends/megatron/test_steps.py",
    "tests/infra/log/test_secured.py",
    "tests/consumers/warehouse/test_process.py",
    "tests/docs/test_training.py",
    "tests/infra/test_tracing.py",
    "tests/consumers/audit/test_any_change.py",
    "tests/streams/test_pills.py",
    "tests/properties/test_histories.py",
    "tests/docs/test_tutorial.py",
    "tests/consumers/test_archive.py",
    "tests/consumers/warehouse/store/test_store.py",
    "tests/consumers/warehouse/questions/test_questions.py",
    "tests/docs/test_sql.py",
    "tests/apps/cli/test_evaluate.py",
    "tests/consumers/warehouse/endpoint/test_http.py",
    "tests/trainers/backends/test_roles.py",
    "tests/trainers/backends/parallel/test_pipeline.py",
    "tests/trainers/backends/parallel/test_cells.py",
    "tests/trainers/backends/parallel/test_context.py",
    "tests/trainers/backends/torch/test_compute.py",
    "tests/trainers/offline/test_job.py",
    "tests/fuzz/test_gateway.py",
    "tests/fuzz/test_stages.py",
)
"""files by their time on a quiet machine, those that mostly wait before others that take as long; behind them those
with a slow test, then those that take seconds each"""
_PLACE = {file: number for number, file in enumerate(LONGEST)}


def scope_of(nodeid: str) -> str:
    """What runs in one process, one after the other."""
    file = _file(nodeid)
    if "sglang" in nodeid:
        return "the SGLang server"
    return "the vLLM server" if file in ENGINE else file


class Longest(LoadFileScheduling):
    """Files as they are collected, those of ENGINE as one."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Longest | None:
    return Longest(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        slow = {_file(item.nodeid) for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: place_of(item.nodeid, slow))


def place_of(nodeid: str, slow: Collection[str] = ()) -> int:
    """Where a test comes; those of one file keep their order. `slow`: files that have a test of that mark, and come
    before those that have none."""
    file = _file(nodeid)
    return _PLACE.get(file, len(LONGEST) if file in slow else len(LONGEST) + 1)


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]
