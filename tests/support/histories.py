"""One history: production stages and runner, scripted players, a seeded scheduler, and every law at the end."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from millrace.infra.config import Governance
from millrace.infra.log.topics import stages_of
from millrace.streams.dispatch.stage import Terms
from millrace.streams.refine.detectors.base import Detector
from millrace.streams.refine.stage import Refine
from millrace.streams.seal.group_outcome import ClosingRules
from millrace.streams.seal.policy_terms import SETTING
from millrace.streams.seal.stage import Seal
from millrace.testing.world import Chances, World
from tests.support import laws
from tests.support.players import SECOND, Crew, Learner, Loader, Plan, version_zero

ACTIONS = 220


@dataclass(frozen=True)
class Told:
    """What a history was, for its counts."""

    seed: int
    events: int
    """records that stages, players and the learner wrote"""
    actions: int
    versions: int
    ready: int
    zombies: int


def plan_of(seed: int) -> Plan:
    """The terms of a seed."""
    r = random.Random(seed)
    return Plan(
        random=r,
        batch=r.randint(1, 3),
        eta=r.choice((0, 0, 1, 1, 2)),
        size=r.choice((1, 2, 2)),
        slots=r.choice((1, 2, 2, 3)),
        release=r.choice(("reserve",) * 6 + ("soft", "reject", "mask-head")),
        share=r.choice((0.0, 0.0, 0.5, 1.0)),
        short=r.choice(("drop", "drop", "train", "top-up")),
        dynamic_sampling=random.Random(f"{seed} dynamic").random() < 0.25,
    )


def run(
    seed: int,
    *,
    actions: int = ACTIONS,
    fencing: bool = True,
    skip_duplicates: bool = True,
    plan: Plan | None = None,
    chances: Chances | None = None,
    strict: bool = False,
    inspect: Callable[[World, Plan], object] | None = None,
) -> Told:
    """Play a seed and check every law. Raises AssertionError; the same seed raises it again."""
    plan = plan or plan_of(seed)
    world = make_world(seed, [plan], fencing=fencing, skip_duplicates=skip_duplicates, chances=chances, strict=strict)
    return play(seed, world, [plan], actions, inspect)[0]


def play(
    seed: int,
    world: World,
    plans: Sequence[Plan],
    actions: int,
    inspect: Callable[[World, Plan], object] | None = None,
) -> list[Told]:
    """Play policies side by side in one world and check every law of each; `world` is closed at the end."""
    players = [(Loader(plan), Crew(plan), Learner(plan)) for plan in plans]
    world.actors = [actor for loader, crew, learner in players for actor in (loader, crew, crew, crew, crew, learner)]
    try:
        for plan in plans:
            begin(world, plan)
        for n in range(actions):
            for plan in plans:
                if plan.random.random() < 0.01:
                    ask(world, plan, n)
            world.chaos(1)
        finish(world, plans, [_version(world, plan) for plan in plans])
        told = []
        for plan in plans:
            facts = laws.check(world, plan)
            if inspect is not None:
                inspect(world, plan)
            events = sum(len(log.entries) for logs in world.bus.logs.values() for log in logs)
            told.append(Told(seed, events, actions, len(facts.weights) - 1, len(facts.ready), plan.zombies))
        return told
    finally:
        for _, _, learner in players:
            learner.close()
        world.close()


def make_world(
    seed: int,
    plans: Sequence[Plan],
    *,
    fencing: bool = True,
    skip_duplicates: bool = True,
    chances: Chances | None = None,
    strict: bool = False,
    isolate: bool = False,
    detectors: Sequence[Detector] = (),
    governance: Governance | None = None,
) -> World:
    """A deployment of one refine, one seal, and a dispatch for each plan, on as many slots as the first plan says."""
    slots = plans[0].slots
    topics = {"raw": slots, "events": slots, "dead-letters": slots, "decisions": 1, "workers": 1}
    sizes = {"prompts": 1, "grants": slots, "trajectories": 2, "evaluations": slots, "completions": 1}
    sizes |= {"resolutions": 1, "weights": 1, "ledger": 1, "scores": 1}
    topics |= {f"{plan.policy}.{name}": count for plan in plans for name, count in sizes.items()}
    rules = ClosingRules(memory=300 * SECOND)
    return World(
        random.Random(f"{seed} world"),
        topics,
        [
            lambda: Refine(governance or Governance(), list(detectors), slots=slots, name_key=b"names"),
            lambda: Seal(rules=rules),
            *(partial(_dispatch, plan, slots) for plan in plans),
        ],
        workers=1,
        chances=chances or Chances(step=14, tick=2, actor=16),
        fencing=fencing,
        skip_duplicates=skip_duplicates,
        strict=strict,
        isolate=isolate,
        turn_records=8,
    )


def _dispatch(plan: Plan, slots: int) -> laws.Watched:
    lease, dynamic = 40 * SECOND, plan.dynamic_sampling
    terms = Terms(release=plan.release, unsolicited_share=plan.share, lease=lease, dynamic_sampling=dynamic)
    return laws.Watched(plan.policy, slots, terms)


def begin(world: World, plan: Plan) -> None:
    """The policy is announced and created."""
    decide(world, plan, "d-sealing", SETTING, {"short_groups": plan.short, "patience_ms": 60_000})
    event, entry = version_zero(plan)
    world.send(f"{plan.policy}.weights", plan.policy, "WeightVersion", event)
    world.send(f"{plan.policy}.ledger", "0", "LedgerEntry", entry)


def decide(world: World, plan: Plan, id: str, name: str, value: object) -> None:
    """A setting is asked for."""
    decision = {"id": id, "kind": "setting", "policy": plan.policy, "name": name, "value": json.dumps(value)}
    world.send("decisions", plan.policy, "Decision", decision | {"reason": "", "author": "test", "time": 0})


def ask(world: World, plan: Plan, number: int) -> None:
    """Somebody asks for another setting."""
    name, value = plan.random.choice((("batch", plan.random.randint(1, 3)), ("eta", plan.random.randint(0, 2))))
    decide(world, plan, f"{plan.policy}{number}", name, value)


def finish(world: World, plans: Sequence[Plan], before: Sequence[int]) -> None:
    """P9: once nothing fails any more, versions are committed, and then everything that is outstanding ends."""
    for plan in plans:
        plan.healthy = True
    for _ in range(200):
        _round(world, SECOND)
        if all(_version(world, plan) >= version + 2 for plan, version in zip(plans, before, strict=True)):
            break
    else:
        raise AssertionError(f"P9: no new version in 200 rounds; the scheduler did: {world.log[-20:]}")
    for plan in plans:
        plan.prompting = False
    for _ in range(200):
        _round(world, 2 * SECOND)
        if not any(world.state(stages_of(plan.policy)["dispatch"], 0).keys("t/") for plan in plans):
            break
    else:
        raise AssertionError("P9: tickets stay outstanding forever")
    world.drain()


def _round(world: World, micros: int) -> None:
    for actor in world.actors:
        actor(world)
    world.advance(micros)
    world.drain()


def _version(world: World, plan: Plan) -> int:
    log = world.bus.logs[f"w.{plan.policy}.ledger"][0]
    return sum(record is not None for record in log.entries[: log.stable]) - 1
