"""The reward process: judges ended episodes of one policy until SIGTERM. Another policy has other verifiers, and a
consumer group of its own."""

from __future__ import annotations

from millrace.infra.config import Settings
from millrace.infra.connect import connect
from millrace.infra.local_keys import kafka_options
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.topics import full_name
from millrace.streams.reward.choose import choose, conversations, independent
from millrace.streams.reward.judge import Evaluator, Judge

IN_FLIGHT = 32
"""episodes judged at once; more than processes, so that publishing overlaps with judging"""


def run(settings: Settings) -> None:
    """Judge what awaits `[reward] source`. Blocks until SIGTERM."""
    from millrace.streams.reward.agents import make_app, run_app

    reward = settings.reward
    verifier = choose(reward)
    evaluator = Evaluator(reward.source, verifier.version, reward.rubric, independent=independent(reward))
    key = reward.key.get_secret_value()
    claims = ClaimStore(settings.claims)
    events = full_name(settings.namespace, "events")
    try:
        with connect(settings) as bus:
            bus.partitions(events)  # faust would go on trying what cannot work
            read = conversations(verifier, bus, events, claims)
            judge = Judge(verifier, evaluator, settings.policy.name, claims, key=key, conversations=read)
            app = make_app(
                full_name(settings.namespace, f"{settings.policy.name}.reward-{reward.source}"),
                events,
                judge,
                bus,
                bootstrap=settings.kafka.bootstrap,
                options=kafka_options(settings),
                data=settings.home / "faust",
                concurrency=IN_FLIGHT,
            )
            run_app(app)
    finally:
        verifier.close()
