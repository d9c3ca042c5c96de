"""Services that whole test runs share. Each starts when the first test asks for it and ends with the run."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from millrace.infra.engines.kind import LocalEngine
from millrace.infra.engines.sglang.launch import Sglang
from millrace.infra.engines.vllm.launch import RECEIVE, Vllm
from millrace.infra.machine.broker import Broker
from millrace.infra.process.net import LOCALHOST, free_ports

pytest_plugins = ["tests.support.order", "tests.support.summary"]

# Models are tiny here: threads of one operation would only wait for each other. Before anything loads torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples in every run, and no deadline: how busy the machine is must not decide.
settings.register_profile("millrace", deadline=None, derandomize=True)
settings.load_profile("millrace")


def pytest_collection_finish() -> None:
    """What is imported and collected stays for the whole run: looking for garbage in it again and again would take a
    fifth of the time of quick tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Bootstrap address of one real broker. Topics, groups and transactional ids are shared: use a namespace of your
    own.
    """
    with Broker(tmp_path_factory.mktemp("broker")) as running:
        running.start()
        yield running.bootstrap


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """One real vLLM server on a tiny random model of seed 0, served as `tiny`, which takes seconds for a long reply.
    Leave it with those weights."""
    from tests.support import unhurried
    from tests.support.tiny_model import write_model

    home = tmp_path_factory.mktemp("vllm")
    url = f"http://{LOCALHOST}:{free_ports(1)[0]}"
    model = write_model(home / "model", seed=0)
    args = (*RECEIVE, *unhurried.ARGS)
    with Vllm(home, url, str(model), "tiny", max_model_len=512, max_num_seqs=32, kv_cache_mb=64, args=args) as running:
        running.start(600)
        yield running


@pytest.fixture(scope="session")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sglang]:
    """One real SGLang server as `vllm` is one. Leave it with the weights of seed 0."""
    from tests.support.engines import KERNELS
    from tests.support.tiny_model import write_model

    home = tmp_path_factory.mktemp("sglang")
    url = f"http://{LOCALHOST}:{free_ports(1)[0]}"
    model = write_model(home / "model", seed=0)
    engine = LocalEngine(home, url, str(model), "tiny", "cpu", 512, 32, 64)
    with pytest.MonkeyPatch.context() as patch, Sglang(engine) as running:
        patch.setenv("PYTHONPATH", str(KERNELS))
        running.start(600)
        yield running
