"""A reward process for the kill test: `python worker.py BOOTSTRAP NAMESPACE DATA`. Slow enough to be killed in the
middle of a verdict."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from millrace.infra.log.kafka.bus import KafkaBus
from millrace.streams.reward.agents import make_app, run_app
from millrace.streams.reward.judge import Evaluator, Judge
from millrace.streams.reward.pool import Verdict


class Slow:
    async def judge(self, task, output, episode):
        await asyncio.sleep(0.01)
        return Verdict(1.0, {}, None, None, None)


if __name__ == "__main__":
    bootstrap, namespace, data = sys.argv[1:]
    judge = Judge(Slow(), Evaluator("verifier", "1", "1"), "p")
    with KafkaBus(bootstrap) as bus:
        run_app(
            make_app(
                f"{namespace}.reward",
                f"{namespace}.events",
                judge,
                bus,
                bootstrap=bootstrap,
                options={},
                data=Path(data),
            )
        )
