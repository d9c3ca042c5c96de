"""One history: production stages and runner, scripted players, a seeded scheduler, and every law at the end."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from infra.config import Governance
from streams.dispatch.stage import Terms
from streams.refine.stage import Refine
from streams.seal.closing import Rules
from streams.seal.stage import Seal
from tests.support import laws
from tests.support.players import POLICY, SECOND, Crew, Learner, Loader, Plan, version_zero
from tests.support.world import Chances, World

ACTIONS = 220
STAGES = ("refine", "seal", "dispatch")


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
    world = make_world(seed, plan, fencing=fencing, skip_duplicates=skip_duplicates, chances=chances, strict=strict)
    players = Loader(plan), Crew(plan), Learner(plan)
    world.actors = [players[0], *(players[1] for _ in range(4)), players[2]]
    try:
        begin(world, plan)
        for n in range(actions):
            if plan.random.random() < 0.01:
                ask(world, plan, n)
            world.chaos(1)
        before = _version(world)
        finish(world, plan, before)
        facts = laws.check(world, plan)
        if inspect is not None:
            inspect(world, plan)
        events = sum(len(log.entries) for logs in world.bus.logs.values() for log in logs)
        return Told(seed, events, actions, len(facts.weights) - 1, len(facts.ready), plan.zombies)
    finally:
        players[2].close()
        world.close()


def make_world(
    seed: int,
    plan: Plan,
    *,
    fencing: bool = True,
    skip_duplicates: bool = True,
    chances: Chances | None = None,
    strict: bool = False,
) -> World:
    """A deployment of the three stages with a plan's terms."""
    topics = {"raw": plan.slots, "events": plan.slots, "dead-letters": plan.slots, "decisions": 1}
    sizes = {"prompts": 1, "grants": plan.slots, "trajectories": 2, "evaluations": plan.slots, "completions": 1}
    sizes |= {"resolutions": 1, "weights": 1, "ledger": 1}
    topics |= {f"{POLICY}.{name}": count for name, count in sizes.items()}
    terms = Terms(release=plan.release, unsolicited_share=plan.share, lease=40 * SECOND)
    rules = Rules(short=plan.short, patience=60 * SECOND, memory=300 * SECOND)  # type: ignore[arg-type]
    return World(
        random.Random(f"{seed} world"),
        topics,
        [
            lambda: Refine(Governance(), [], slots=plan.slots),
            lambda: Seal([POLICY], rules),
            lambda: laws.Watched(POLICY, plan.slots, terms),
        ],
        workers=1,
        chances=chances or Chances(step=14, tick=2, actor=16),
        fencing=fencing,
        skip_duplicates=skip_duplicates,
        strict=strict,
        turn_records=8,
    )


def begin(world: World, plan: Plan) -> None:
    """The policy is created."""
    event, entry = version_zero(plan)
    world.send(f"{POLICY}.weights", POLICY, "WeightVersion", event)
    world.send(f"{POLICY}.ledger", "0", "LedgerEntry", entry)


def ask(world: World, plan: Plan, number: int) -> None:
    """Somebody asks for another setting."""
    name, value = plan.random.choice((("batch", plan.random.randint(1, 3)), ("eta", plan.random.randint(0, 2))))
    decision = {"id": f"d{number}", "kind": "setting", "policy": POLICY, "name": name, "value": json.dumps(value)}
    world.send("decisions", POLICY, "Decision", decision | {"reason": "", "author": "test", "time": 0})


def finish(world: World, plan: Plan, before: int) -> None:
    """P9: once nothing fails any more, versions are committed, and then everything that is outstanding ends."""
    plan.healthy = True
    for _ in range(200):
        _round(world, SECOND)
        if _version(world) >= before + 2:
            break
    else:
        raise AssertionError(f"P9: no new version in 200 rounds; the scheduler did: {world.log[-20:]}")
    plan.prompting = False
    for _ in range(200):
        _round(world, 2 * SECOND)
        if not world.state("dispatch", 0).keys("t/"):
            break
    else:
        raise AssertionError("P9: tickets stay outstanding forever")
    world.drain()


def _round(world: World, micros: int) -> None:
    for actor in world.actors:
        actor(world)
    world.advance(micros)
    world.drain()


def _version(world: World) -> int:
    log = world.bus.logs[f"w.{POLICY}.ledger"][0]
    return sum(record is not None for record in log.entries[: log.stable]) - 1
