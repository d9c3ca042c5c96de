"""The contract of a stage, checked by whole histories in memory.

    from millrace.testing import Sent, check_stage

    def test_my_stage() -> None:
        records = [Sent("events", f"key-{n % 3}", "Event", event) for n, event in enumerate(events)]
        check_stage(MyStage, {"events": 2, "out": 1}, records)

Invariant: the runner is the one of production; only the bus, the clock and the scheduler are the tests'."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from millrace.infra.log.topics import logical_name
from millrace.infra.stages.base import Stage
from millrace.infra.stages.state import RUNNER_PREFIX
from millrace.schemas import codec
from millrace.testing.world import CALM, Chances, World

DEATHS = Chances(crash=2, zombie=2, wake=2, expire=3, scale=0.5, resend=0, hole=0)
"""Many deaths, and inputs that lie where they lie in a calm history, so that whole outputs can be compared."""
ROUNDS, SECONDS = 3, 20
PLACE = {"topic", "partition", "offset"}


@dataclass(frozen=True, slots=True)
class Sent:
    """A record on its way to a stage: `World.send` takes the same."""

    topic: str
    key: str
    name: str
    record: Mapping[str, object] | bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    partition: int | None = None


def check_stage(
    make: Callable[[], Stage],
    topics: Mapping[str, int],
    records: Sequence[Sent],
    *,
    seeds: Iterable[int] = range(20),
    law: Callable[[World], object] = lambda world: None,
) -> None:
    """Run the stage on the records, once undisturbed and once for each seed with processes that die, freeze and are
    replaced at random points. `topics`: partitions of every topic that it reads or writes. `law` looks at the world at
    the end of each history, and raises what it does not like.

    - Every turn, folded again by a new instance, gives what was written: the fold is pure. Raises ReplayError.
    - What it read from its state is not changed in place, and no record makes it raise. Raises StageError, or what the
      stage raises.
    - Deaths, and where turns are cut, change neither what it emitted nor its state. Raises AssertionError. A clock
      stage is left out of this: its outputs follow the time, which differs.

    Records of sides are sent, and folded, before those of the primary: in a live system their order is anybody's."""
    stage = make()
    sequence = sorted(records, key=lambda item: item.topic not in stage.sides or item.topic == stage.primary)
    with World(0, topics, [make], workers=1, chances=CALM, strict=True, turn_records=1_000) as calm:
        _history(calm, stage, sequence, law)
        calm_outcome = _outcome(calm, stage, topics)
    for seed in seeds:
        with World(seed, topics, [make], chances=DEATHS, strict=True, turn_records=1 + seed % 7) as world:
            _history(world, stage, sequence, law)
            outcome = _outcome(world, stage, topics)
        if not stage.clock:
            assert outcome == calm_outcome, _differ(stage, seed, calm_outcome, outcome, world.log)


def _history(world: World, stage: Stage, records: Sequence[Sent], law: Callable[[World], object]) -> None:
    sides = True
    for item in records:
        if sides and item.topic == stage.primary:
            sides = False
            world.drain()
        world.send(item.topic, item.key, item.name, item.record, headers=item.headers, partition=item.partition)
        if not sides and world.chances != CALM:
            world.chaos(4)
    world.drain()
    if stage.clock:
        for _ in range(ROUNDS):
            world.advance(SECONDS * 1_000_000)
            world.drain()
    world.verify()
    law(world)


def _outcome(world: World, stage: Stage, topics: Mapping[str, int]) -> dict[str, Counter[str]]:
    """What a history came to: under each topic its records however they interleave, under `state` what slots hold."""
    inputs = {stage.primary, *stage.sides}
    outputs = {
        topic: Counter(
            f"{record.key!r} {_without_places(codec.decode(record.value), inputs)!r}"
            for record in world.records(topic)
            if record.value is not None
        )
        for topic in topics
        if topic not in inputs
    }
    state: Counter[str] = Counter()
    for slot in range(topics[stage.primary]):
        for part, entries in world.state(stage.name, slot).snapshot().items():
            state.update(
                f"{slot} {part} {key}={value!r}" for key, value in entries.items() if not key.startswith(RUNNER_PREFIX)
            )
    return {**outputs, "state": state}


def _without_places(value: object, inputs: set[str]) -> object:
    """A value without the places of what the stage wrote: transactions that died leave holes between them."""
    if isinstance(value, dict):
        if set(value) == PLACE and logical_name(value["topic"]) not in inputs:
            return "a place"
        return {name: _without_places(part, inputs) for name, part in value.items()}
    return [_without_places(part, inputs) for part in value] if isinstance(value, list | tuple) else value


def _differ(
    stage: Stage, seed: int, calm_outcome: dict[str, Counter[str]], outcome: dict[str, Counter[str]], log: Sequence[str]
) -> str:
    lines = [
        f"{stage.name} came to something else in the history of seed {seed}, whose scheduler did {list(log[-20:])}:"
    ]
    for topic in calm_outcome:
        lines += [f"- {topic} lacks {one[:300]}" for one in list(calm_outcome[topic] - outcome[topic])[:3]]
        lines += [f"- {topic} has besides {one[:300]}" for one in list(outcome[topic] - calm_outcome[topic])[:3]]
    return "\n".join(lines)
