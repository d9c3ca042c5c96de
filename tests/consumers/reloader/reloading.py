"""A reloader as a process of its own, before a real broker; and the engines that such tests share."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from millrace.infra.engines.control import EngineControl
from millrace.infra.engines.kinds import KINDS, KindName
from millrace.infra.engines.sglang.launch import Sglang
from millrace.infra.engines.vllm.launch import Vllm
from tests.support.engines import LightEngine
from tests.support.forked import Fork
from tests.support.learners import ROOT

RUN = "from millrace.infra.config import load; from millrace.consumers.reloader.serve import run; run(load())"


@dataclass
class Served:
    """A server, its kind, and who changes its weights."""

    kind: KindName
    server: LightEngine | Vllm | Sglang
    url: str
    control: EngineControl


@asynccontextmanager
async def served_by(name: str, server: LightEngine | Vllm | Sglang, folder: Path) -> AsyncIterator[Served]:
    """The server that the fixture `name` gives; left with the weights in `folder`, as it was."""
    kind: KindName = "inprocess" if name == "receiver" else name  # type: ignore[assignment]
    one = Served(kind, server, server.url, KINDS[kind].control(server.url, ""))
    yield one
    await leave(one.control, folder)


async def leave(control: EngineControl, folder: Path) -> None:
    """Give a server that others use its first weights back, and close its control."""
    await control.pause("abort")
    await control.load(folder)
    await control.set_version("default")
    await control.reset_prefix_cache()
    await control.resume()
    await control.close()


def spawn(broker: str, namespace: str, policy: str, url: str, log: Path, **more: str) -> Fork:
    """Starts it for the in-process engine at `url`; what it says is appended to `log`. more: settings and fault points
    by what follows MILLRACE_."""
    settings = {
        "NAMESPACE": namespace,
        "KAFKA__BOOTSTRAP": broker,
        "POLICY__NAME": policy,
        "ENGINE__KIND": "inprocess",
        "ENGINE__URL": url,
        **more,
    }
    told = {f"MILLRACE_{name}": value for name, value in settings.items()}
    return Fork(RUN, {**os.environ, "PYTHONPATH": str(ROOT), **told}, ROOT, log)
