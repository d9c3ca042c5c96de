"""A whole history in memory, written by the production runner and stages: every topic filled, every figure true.

Unlike `tests.support.history` its derived records are what the stages fold, so an audit can fold them again; unlike
`tests.support.histories` its learner says everything that a real one says, so an audit can recompute it."""

from __future__ import annotations

import copy
import hashlib
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from millrace.consumers.audit import AuditReport, audit
from millrace.consumers.audit.facts import Facts
from millrace.consumers.learner.group.agreement import client_id
from millrace.consumers.learner.group.identity import Identity
from millrace.consumers.learner.version.order import Batch
from millrace.consumers.learner.version.records import batch_staleness, histogram
from millrace.infra.log.base import Place, Record
from millrace.infra.log.history import ledger
from millrace.infra.log.memory.bus import MemoryBus
from millrace.infra.log.topics import full_name, stages_of, turns_of
from millrace.infra.stages import decisions
from millrace.infra.stages.base import Stage
from millrace.schemas import arrays, codec
from millrace.streams.dispatch.stage import Dispatch, Terms
from millrace.streams.refine.detectors.base import Detector, Hit
from millrace.testing.events import Episode
from millrace.testing.world import NAMESPACE, Chances, World
from millrace.trainers.learning import Share
from millrace.trainers.weights.manifest import Manifest, subset_hash
from tests.support import histories
from tests.support.histories import make_world
from tests.support.players import POLICY, SECOND, Crew, Learner, Life, Loader, Plan
from tests.support.scored import evaluation

SHARED = ("raw", "events", "dead-letters", "decisions")
KINDS = (
    "raw",
    "events",
    "dead-letters",
    "decisions",
    "prompts",
    "grants",
    "trajectories",
    "evaluations",
    "completions",
    "resolutions",
    "weights",
    "ledger",
    "turns.refine",
    "turns.seal",
    "turns.dispatch",
)
"""the history: what the audit reads, but for `scores`, which lead nowhere. Changelogs are what turns come to, `workers`
what processes say of themselves"""


CONFIG = '{"learner": {"lr": 0.001, "reference": "sha256:ab", "teacher": ""}, "policy": "p", "release": "reserve"}'
LEARNER = Identity(
    hashlib.sha256(CONFIG.encode()).hexdigest(), "123456789a", {"torch": "2"}, "x", CONFIG, {"reference": "ab"}
)
MEMBER = f"{client_id(f'learner/{LEARNER.tag}', 'host', 1)}-{'0' * 8}"
"""as a broker makes it of a client id"""


@dataclass
class Whole:
    """The logs of a world at rest, and what folds them again."""

    bus: MemoryBus
    stages: Mapping[str, Stage]

    def copy(self) -> Self:
        """The same logs to break; records are shared."""
        other = copy.copy(self)
        other.bus = MemoryBus({name: len(logs) for name, logs in self.bus.logs.items()})
        for name, logs in self.bus.logs.items():
            for log, mine in zip(other.bus.logs[name], logs, strict=True):
                log.entries, log.start = list(mine.entries), mine.start
        return other

    def audit(self, *, quick: bool = False) -> AuditReport:
        """The audit, with every turn folded again unless `quick`."""
        makers: dict[str, Callable[[Facts], Stage]] = {role: lambda _, s=s: s for role, s in self.stages.items()}
        return audit(self.bus, NAMESPACE, POLICY, makers=None if quick else makers)

    def topic(self, kind: str) -> str:
        if kind.startswith("turns."):
            return full_name(NAMESPACE, turns_of(stages_of(POLICY)[kind.removeprefix("turns.")]))
        return full_name(NAMESPACE, kind if kind in SHARED else f"{POLICY}.{kind}")

    def records(self, kind: str) -> Iterator[Record]:
        """Every record of a kind of topic."""
        for partition in range(self.bus.partitions(self.topic(kind))):
            yield from self.bus.read(self.topic(kind), partition)

    def rows(self, kind: str) -> list[tuple[Record, dict[str, Any]]]:
        """Those that decode, decoded; progress left out."""
        found = []
        for record in self.records(kind):
            if (record.value or b"")[:2] == codec.MARK and codec.name_of(record.value or b"") != "Progress":
                found.append((record, codec.decode(record.value or b"")[1]))
        return found


def whole(
    seed: int = 0,
    actions: int = 160,
    *,
    isolate: bool = False,
    later: Callable[[World], None] = lambda world: None,
) -> Whole:
    """Play a history: grants and traffic nobody asked for, top-ups, evaluations, duplicates, dead letters, settings.
    `isolate`: what a stage raises is a dead letter, as in production, and not raised here. `later`: done when all is
    at rest, while the stages still run."""
    plan = Plan(
        random=random.Random(seed),
        batch=2,
        eta=1,
        size=2,
        slots=2,
        release="reserve",
        share=0.5,
        short="top-up",
    )
    chances = Chances(step=14, tick=2, actor=16, scale=0)
    world = make_world(seed, [plan], chances=chances, isolate=isolate, detectors=[Planted()])
    trainer = Trainer(plan)
    crew, extras = Crew(plan), _Extras(plan)
    world.actors = [Loader(plan), crew, crew, crew, crew, trainer, extras]
    try:
        _begin(world, plan)
        for number in range(actions):
            if number in (actions // 3, 2 * actions // 3):
                _decide(world, *(("eta", 2) if number < actions // 2 else ("batch", 3)))
            world.chaos(1)
        histories.finish(world, [plan], [histories._version(world, plan)])
        later(world)
        for entry in world.decoded(f"{POLICY}.ledger")[:3]:
            world.send(f"{POLICY}.scores", str(entry["version"]), "Evaluation", evaluation(POLICY, entry))
        roles = {name.rpartition(".")[2]: stage for name, stage in world._instances.items()}
        terms = Terms(unsolicited_share=plan.share, lease=40 * SECOND)
        roles["dispatch"] = Dispatch(POLICY, plan.slots, terms)
        return Whole(world.bus, roles)
    finally:
        trainer.close()
        world.close()


def _begin(world: World, plan: Plan) -> None:
    _decide(world, "sealing", {"short_groups": plan.short, "patience_ms": 60_000})
    event = {"policy": POLICY, "version": 0, "parent": None, "seq_lo": 0, "seq_hi": 0, "time": world.now}
    event |= {"batch": plan.batch, "eta": plan.eta, "shards": 2, "group_size": plan.size}
    event |= _directory(0, "the beginning")
    entry = {"policy": POLICY, "version": 0, "seq_lo": 0, "seq_hi": 0, "groups": [], "ranks": [], "layout": ""}
    entry |= {"generation": 0, "leader": "", "unchanged": None, "masked_tokens": 0, "digest": event["digest"]}
    entry |= {"libraries": {}, "cpu": "", "config_hash": "", "code_hash": "", "metrics": {}, "eta": plan.eta}
    entry |= {"prev_hash": b"", "hash": b"", "time": world.now}
    world.send(f"{POLICY}.weights", POLICY, "WeightVersion", event)
    world.send(f"{POLICY}.ledger", "0", "LedgerEntry", ledger.chain_entry(entry, b""))  # type: ignore[arg-type]


def _decide(world: World, name: str, value: object) -> None:
    """A setting is asked for as a process asks that was started with another file."""
    world.send("decisions", POLICY, "Decision", decisions.setting(POLICY, name, value, world.now))


def _directory(version: int, content: str) -> dict[str, Any]:
    """What a weight event says of its directory."""
    files = {"model.safetensors": content, "config.json": "config", "tokenizer.json": "tokenizer"}
    manifest = Manifest({name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()})
    return {
        "mode": "full",
        "uri": f"/weights/p/v{version}-{manifest.digest[:12]}",
        "digest": manifest.digest,
        "files": dict(manifest.files),
        "tokenizer_hash": subset_hash(manifest, ("tokenizer.json",)),
        "template_hash": "c",
        "full_bytes": 1000,
    }


class _Trainer(Life):
    """A learner whose records say what those of `millrace.consumers.learner.version.records` say."""

    def records(self, world: World, batch: Batch, masked: int) -> tuple[Any, Any]:
        assert self.head is not None
        event, entry = super().records(world, batch, masked)
        places = [Place(**place) for group in batch.groups for place in group["trajectories"]]
        samples = [codec.decode_as("Trajectory", r.value or b"") for r in world.bus.fetch(places) if r is not None]
        ages = np.concatenate([_ages(sample, self.head.version) for sample in samples] or [np.zeros(0)])
        rewards = [sample["reward"] for sample in samples if sample["reward"] is not None]
        shares = [Share(len(samples), sum(sample["length"] for sample in samples), len(batch.groups))]
        counts = np.bincount(np.clip(ages, 0, 8).astype(int), minlength=9)
        metrics = {
            "reward_mean": math.fsum(rewards) / len(rewards) if rewards else 0.0,
            "staleness_mean": float(ages.mean()) if len(ages) else 0.0,
            "staleness_max": float(ages.max()) if len(ages) else 0.0,
            "tokens_trainable": float(len(ages)),
            "tokens_computed": float(shares[0].tokens),
            "samples": float(len(samples)),
            "samples_without_reward": float(len(samples) - len(rewards)),
            "full_bytes": 1000.0,
            "sent_bytes": 1000.0,
            "steps": 1.0,
            "steps_skipped": 0.0,
            "loss": 0.25,
            "timings_step": 1.5,
        }
        event |= _directory(event["version"], entry["digest"]) | {"time": world.now}
        entry |= {
            "digest": event["digest"],
            "groups": [group | {"cell": 0} for group in entry["groups"]],
            "ranks": [
                {"rank": 0, "member": MEMBER, "cell": 0}
                | {"samples": shares[0].samples, "tokens": shares[0].tokens, "groups": shares[0].groups}
            ],
            "layout": "torch:d1",
            "generation": 1,
            "leader": MEMBER,
            "libraries": dict(LEARNER.libraries),
            "cpu": LEARNER.cpu,
            "config_hash": LEARNER.config,
            "code_hash": LEARNER.code,
            "config": LEARNER.text,
            "models": dict(LEARNER.models),
            "device": "cpu",
            "threads": 1,
            "kernels": {},
            "metrics": metrics | histogram([float(n) for n in counts]) | batch_staleness(batch, self.head.version),
            "time": world.now,
        }
        return event, ledger.chain_entry(entry, self.head.entry["hash"])


def _ages(sample: Mapping[str, Any], version: int) -> Any:
    found = [np.zeros(0)]
    for lineage in sample["lineages"]:
        mask = arrays.unpack(lineage["mask"]).astype(bool)
        found.append(version - arrays.unpack(lineage["versions"])[mask])
    return np.concatenate(found)


class Trainer(Learner):
    life = _Trainer


class Planted(Detector):
    """Finds what says that it is secret."""

    name = "planted"

    def version(self) -> str:
        return "planted-1"

    def scan(self, text: bytes) -> list[Hit]:
        return [Hit(*found.span(), "secret", "planted", blocks=True) for found in re.finditer(rb"secret-\d+", text)]


class _Extras:
    """Now and then: an evaluation, an attempt with tools and a person's word, bytes that are no record, secrets in
    names and texts."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.count = plan, 0
        self.former: list[Episode] = []

    def __call__(self, world: World) -> None:
        if not self.plan.prompting or self.plan.random.random() > 0.4:
            return
        self.count += 1
        name = f"extra-{self.count}"
        for episode in self.former[-2:]:
            again = episode.reward(0.25, judge="replayer", n=self.count, rubric_version="2", replay="again")
            world.send("raw", episode.key, "Event", again)
        match self.count % 4:
            case 0:
                world.send("raw", "local/bad", "", b"not avro")
            case 1:
                episode = Episode(name, split="evaluation", source="p-gateway-0")
                self._send(world, episode, [episode.start(), episode.call(f"{name}-0"), episode.end()])
                world.send("raw", episode.key, "Event", episode.reward(0.5))
            case 2:
                episode = Episode(name, group=f"case secret-{self.count}", attempt="secret-0", source="p-gateway-0")
                call = episode.call(f"{name}-0", text=f"my word is secret-{self.count}")
                self._send(world, episode, [episode.start(), episode.call(f"secret-{self.count}"), call, episode.end()])
                reward = episode.reward(1.0, target=f"case secret-{self.count}", target_kind="group")
                world.send("raw", episode.key, "Event", reward)
                lost = Episode(name, group="another secret-1", source="p-gateway-0")
                world.send("raw", lost.key, "Event", lost.event("gap", {"missed": 1, "reason": "x"}), source="secret-2")
            case _:
                episode = Episode(name, source="p-gateway-1")
                call = {"call_id": "c", "name": "look", "arguments": "{}", "response_id": f"{name}-0"}
                result = {"call_id": "c", "name": "look", "status": "ok", "content": "seen", "tool_version": None}
                feedback = {"response_id": f"{name}-0", "rating": 1.0, "label": None, "text": None}
                label = {"classification": "internal", "labels": [], "scopes": []}
                events = [episode.start(), episode.event("security_label", label), episode.call(f"{name}-0")]
                events += [episode.event("tool_call", call)]
                events += [episode.event("tool_result", result | {"latency_us": 5, "side_effect": None})]
                events += [episode.event("user_feedback", feedback), episode.end()]
                self._send(world, episode, events)

    def _send(self, world: World, episode: Episode, events: list[dict[str, Any]]) -> None:
        self.former.append(episode)
        for event in events:
            world.send("raw", episode.key, "Event", event, source=episode.source)
