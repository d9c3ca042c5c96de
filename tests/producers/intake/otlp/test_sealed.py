"""What the receiver made, through the forwarder and the stages: governed and sealed like anything else, and it trains
nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from millrace.infra.log.blobs import ClaimStore
from millrace.producers.capture.forwarder import Forwarder
from millrace.producers.intake.otlp.assembler import Assembler
from millrace.producers.intake.otlp.receiver import OtlpReceiver
from millrace.testing.world import World
from tests.formats.imports.test_import import events, small
from tests.producers.intake.otlp.test_receiver import QUIET, Clock, opened
from tests.support.spans import a_call, a_span, an_evaluation, conversations, read_spans
from tests.support.whole import NAMESPACE, POLICY

AGENT = {"gen_ai.operation.name": "invoke_agent"}
PATIENCE_S = 60
REWARD_KEY = "who may give rewards"


def sent(world: World, receiver: OtlpReceiver, folder: Path) -> None:
    """Everything that the receiver made is in raw, and the stages have taken it."""
    sender = Forwarder(receiver.events, world.bus, f"{NAMESPACE}.raw", ClaimStore(str(folder / "claims")))
    sender.start()
    assert sender.drain(PATIENCE_S)
    sender.close()
    world.drain()


def receiving(folder: Path, clock: Clock) -> OtlpReceiver:
    """A receiver of the world's policy."""
    bare = opened(folder, clock)
    return OtlpReceiver(bare.spans, bare.events, Assembler(POLICY, QUIET), reward_key=REWARD_KEY, clock=clock)


def test_a_conversation_with_a_sub_agent_is_one_sample_with_its_rewards(tmp_path: Path) -> None:
    spans = [
        a_span(1, AGENT),
        a_span(2, a_call("q", "a", "r2"), parent=1),
        a_span(3, AGENT, parent=1),
        a_span(4, a_call("other", "a", "r4"), parent=3),
    ]
    clock = Clock()
    receiver = receiving(tmp_path, clock)
    receiver.take("local", read_spans([*spans, an_evaluation(9, 0.75)]))
    clock.now += QUIET
    receiver.close_due()
    with small(reward_key=REWARD_KEY) as world:
        sent(world, receiver, tmp_path)
        assert world.decoded("dead-letters") == []
        (sample,) = world.decoded(f"{POLICY}.trajectories")
        assert (sample["lineages"], sample["tokens"], sample["reward"]) == ([], 0, 0.75)
        assert len({one["trajectory"] for one in events(world)}) == 2
        assert {reason.partition(":")[2] for reason in sample["excluded"]} == {"observed"}
        late = an_evaluation(10, 0.25, **{"gen_ai.response.id": "r4"})
        receiver.take("local", read_spans([late]))
        sent(world, receiver, tmp_path)
        rewards = [one for one in events(world) if one["kind"] == "reward"]
        assert [one["governance"]["eligibility"] for one in rewards] == [rewards[0]["governance"]["eligibility"]] * 2
        world.verify()
    receiver.close()


@given(conversations())
@settings(max_examples=15, deadline=None)
def test_refine_takes_every_event_of_any_conversation(
    tmp_path_factory: pytest.TempPathFactory, given: list[Any]
) -> None:
    folder = tmp_path_factory.mktemp("sealed")
    clock = Clock()
    receiver = receiving(folder, clock)
    receiver.take("local", read_spans(given))
    clock.now += QUIET
    receiver.close_due()
    with small(reward_key=REWARD_KEY) as world:
        sent(world, receiver, folder)
        # Of two judgements of one reply by one evaluator the first counts.
        assert {one["reason"] for one in world.decoded("dead-letters")} <= {"duplicate_reward"}
        assert len(events(world)) == receiver.events.end
        assert {one["governance"]["reason"] for one in events(world)} <= {"tenant:local"}
        world.verify()
    receiver.close()
