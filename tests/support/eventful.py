"""An eventful run: a whole history in memory that holds what questions are asked about.

Production stages fold it; a script plays everybody else, calmly and the same each time. Two tenants and a third that
nobody allowed; tasks that come again in later epochs; two engines and an outside provider that reports a cost and no
tokens; tools that work, fail, run late and never answer; a sub-agent; rewards that count, fail, come twice, are
corrected in time or come too late; a branch, which learned from what the policy sampled; another policy's traffic; a
rerun of a sample, a group that is topped up, one that fails, one whose lease
ends; evaluation of several versions; bytes that are no record.

What holds in it is computed by tests from its records, never written down beside it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import orjson

from millrace.infra.config import Governance
from millrace.infra.config.experience import Tenant
from millrace.infra.log.base import Place
from millrace.schemas import codec
from millrace.testing.events import Episode, stable_id
from millrace.testing.world import CALM, NAMESPACE, World
from tests.support import whole
from tests.support.grafted import Group, graft
from tests.support.histories import make_world
from tests.support.players import POLICY, SECOND, Plan
from tests.support.whole import Trainer, Whole

MS = 1_000
TASKS = ("sort", "sum", "search")
HELD_OUT = ("held-sort", "held-sum")
TENANTS = ("acme", "globex")
STRANGER = "initech"
"""a tenant without a rule: recorded, never trained on"""
ENGINES = (("vllm", "0.11", "engine-0/1"), ("inprocess", "1", "engine-1/4"), ("openai", "https://models.example", ""))
"""kind, version and incarnation; the last one is an outside provider, which has none"""
OTHER = "q"
"""a policy that is only observed"""
BRANCH, BEGINS = "b", 3
"""a branch, and the version of the policy that it begins at"""
EPOCHS = 6
LEASE, IDLE = 40 * SECOND, 4


@cache
def eventful(epochs: int = EPOCHS, seed: int = 0) -> Whole:
    """The run, its logs at rest. Who asks again gets the same one: leave it as it is, or alter a copy."""
    plan = Plan(random.Random(seed), batch=2, eta=2, size=2, slots=2, release="reserve", share=0.5, short="top-up")
    plan.healthy = True
    tenants = {name: Tenant() for name in TENANTS}
    world = make_world(seed, [plan], chances=CALM, governance=Governance(tenants=tenants))
    script = _Script(plan, world, random.Random(seed))
    trainer = Trainer(plan)
    try:
        whole._begin(world, plan)
        for number in range(epochs * len(TASKS)):
            script.prompt(number)
        idle = 0
        while idle < IDLE:
            world.drain()
            trainer(world)
            idle = 0 if script.round() else idle + 1
            world.advance(SECOND if idle == 0 else LEASE // 2)
        script.after()
        world.advance(LEASE)
        world.drain()
        run = Whole(world.bus, {})
        graft(world.bus, NAMESPACE, POLICY, BEGINS, BRANCH, _chosen(run))
        return run
    finally:
        trainer.close()
        world.close()


def _chosen(run: Whole) -> list[list[Group]]:
    """What the branch learned from: the first group of each of the first versions, more of them than it begins at."""
    return [
        [(group["group"], [Place(**place) for place in group["trajectories"]]) for group in entry["groups"][:1]]
        for _, entry in run.rows("ledger")[1 : 2 * BEGINS]
    ]


@dataclass
class _Script:
    """Everybody who is no stage and no learner."""

    plan: Plan
    world: World
    random: random.Random
    version: int = -1
    number: int = 0
    late: list[tuple[Episode, dict[str, Any]]] = field(default_factory=list)
    """rewards that come after their samples were sealed"""
    seen: list[int] = field(default_factory=list)

    # -- the world

    def prompt(self, number: int) -> None:
        """A task is asked for, under an id of its own in each epoch."""
        epoch, index = divmod(number, len(TASKS))
        task = TASKS[index]
        prompt = {"id": f"{task}@{epoch}" if epoch else task, "policy": POLICY, "number": number}
        prompt |= {"task": orjson.dumps({"question": task}).decode(), "group_size": None}
        awaits = ["verifier", "style"] if task == "sum" else ["verifier"]
        self.world.send(f"{POLICY}.prompts", str(prompt["id"]), "Prompt", prompt | {"awaits": awaits})

    def round(self) -> bool:
        """Answer every new grant, evaluate every new version; whether there was anything to do."""
        for record in self.world.new("script", f"{POLICY}.weights"):
            self.version = codec.decode_as("WeightVersion", record.value or b"")["version"]
            if self.version % 2 == 0:
                for task in HELD_OUT:
                    self.evaluation(task)
                self.told_evaluation()
        grants = [
            codec.decode_as("Grant", record.value or b"") for record in self.world.new("script", f"{POLICY}.grants")
        ]
        for grant in sorted(grants, key=lambda grant: (grant["ticket"], grant["round"])):
            for sample in grant["samples"]:
                self.sample(grant, sample)
            self.world.drain()
        while self.late:
            episode, reward = self.late.pop()
            self.put(episode, [reward])
            if self.version > 3:  # somebody judges history anew, with another verifier
                anew = {"source": "strict", "rubric_version": "2", "n": 5, "replay": "replay-1"}
                self.put(episode, [episode.reward(0.0625, **anew)])
        for tenant in TENANTS if grants else ():
            self.outside(tenant)
        return bool(grants)

    def after(self) -> None:
        """What nobody asked for: a stranger's traffic, traffic that may train, a reward for nothing, no record."""
        stranger = self.episode("stranger", tenant=STRANGER, awaits=[])
        self.put(stranger, [stranger.start(), self.call(stranger, 0), stranger.end()])
        for tenant in TENANTS:
            wild = self.episode(f"wild-{tenant}", tenant=tenant, awaits=["verifier"])
            self.put(wild, [wild.start(), self.call(wild, 0), wild.end()])
            self.put(wild, [wild.reward(0.5)])
        nobody = self.episode("nobody", tenant="acme")
        self.put(nobody, [nobody.reward(1.0)])
        self.world.send("raw", "acme/bad", "", b"not avro")
        other = self.episode("other", tenant="acme", policy=OTHER, awaits=[])
        self.put(other, [other.start(), self.call(other, 0)])
        self.tool(other, 0, 1)
        self.put(other, [other.end()])
        gap = self.episode("gap", tenant="acme", awaits=[])
        self.put(gap, [gap.start(), self.call(gap, 0), gap.event("gap", {"missed": 2, "reason": "disk full"})])
        self.put(gap, [gap.end(whole=False)])

    # -- episodes

    def episode(self, name: str, *, tenant: str, **terms: Any) -> Episode:
        self.number += 1
        terms = {"awaits": ["verifier"], "wait_ms": 4_000, "attempt": f"attempt-{self.number}"} | terms
        source = f"{POLICY}-gateway-{self.number % 2}"
        root = stable_id("episode", name, self.number)
        return Episode(root, tenant=tenant, source=source, clock=lambda: self.world.now, **terms)

    def sample(self, grant: dict[str, Any], sample: int) -> None:
        """One sample of a grant. What happens in it goes by the ticket."""
        ticket, again = grant["ticket"], grant["round"] > 0
        if ticket == 7:
            return  # no worker takes it: its lease ends
        terms = {"ticket": ticket, "size": grant["group_size"], "sample": sample, "awaits": grant["awaits"]}
        terms |= {"min_version": grant["min_version"], "deadline": grant["deadline"], "task": grant["task"]}
        terms |= {"task_id": grant["prompt_id"]}
        tenant = TENANTS[ticket % 2]
        episode = self.episode(f"{ticket}-{sample}", tenant=tenant, **terms)
        self.put(episode, [episode.start()])
        keep, low = 0, grant["min_version"]
        for turn in range(1 + (ticket + sample) % 3):
            version = self.random.randint(low, self.version)
            call = self.call(episode, turn, version=version, keep=keep, engine=(ticket + sample + turn) % 2)
            self.put(episode, [call])
            keep, low = keep + 3 + turn + 2 + sample, version
            if grant["prompt_id"].startswith("search"):
                self.tool(episode, turn, ticket)
        if ticket == 8 and sample == 0:
            self.delegate(episode)
        failed = ticket == 9 or (ticket == 5 and not again and sample == 1)
        self.put(episode, [episode.end("failed" if failed else "completed")])
        if ticket == 10 and sample == 0:
            other = self.episode("rerun", tenant=tenant, **terms)  # another worker runs the sample again
            self.put(other, [other.start(), self.call(other, 0, version=low), other.end(), other.reward(0.75)])
        if not failed:
            self.world.advance((100 + 50 * (ticket % 5)) * MS)
            self.judge(episode, ticket, sample, "style" in grant["awaits"])

    def judge(self, episode: Episode, ticket: int, sample: int, styled: bool) -> None:
        """What the verifier says, and for some tasks a judge of style."""
        value = round(self.random.uniform(0, 0.4) + 0.1 * min(6, self.version + 1) * (1 + ticket % 2) / 2, 3)
        reward = episode.reward(None if ticket == 12 and sample == 0 else value)
        first = episode.reward(0.25, source="style", n=1) if styled else None
        if first is not None:
            self.put(episode, [first])
            body = codec.decode_body("reward", first["body"])
            if sample == 1:  # corrected before the verifier has spoken, so in time
                better = {"source": "style", "n": 2, "supersedes": body["reward_id"]}
                self.put(episode, [episode.reward(0.125, **better)])
        twice = [episode.reward(value + 1, n=3)] if ticket == 4 else []
        self.put(episode, [reward, *twice])
        if ticket % 3 == 0:
            late = episode.reward(round(value / 2, 3), n=4, rubric_version="2")
            self.late.append((episode, late))

    def evaluation(self, task: str) -> None:
        """A held-out task, answered by the newest version."""
        episode = self.episode(f"evaluation-{task}", tenant="acme", split="evaluation", task_id=task)
        events = [episode.start(), self.call(episode, 0, version=self.version, engine=0), episode.end()]
        self.put(episode, [*events, episode.reward(round(0.1 * self.version + 0.05 * len(task), 3))])

    def told_evaluation(self) -> None:
        """What `millrace evaluate` writes about the newest version."""
        scores = [{"task_id": task, "rewards": [0.1 * self.version, 0.25, None]} for task in HELD_OUT]
        told = {"id": stable_id("evaluation", self.version), "policy": POLICY, "version": self.version}
        told |= {"versions": [self.version], "digest": None, "ledger_hash": None, "model": "somewhere"}
        told |= {"engine": "in-process", "agent": None, "tasks": "held-out.jsonl", "tasks_digest": "d"}
        told |= {"questions": len(HELD_OUT), "samples": 3, "verifier": "exact", "success": 1.0, "temperature": 1.0}
        told |= {"max_tokens": 16, "seed": 0, "mean": 0.05 * self.version + 0.125, "standard_error": 0.01}
        told |= {"pass_at": {"1": 0.25}, "unfinished": 0, "unjudged": len(HELD_OUT), "scores": scores}
        self.world.send(f"{POLICY}.scores", str(self.version), "Evaluation", told | {"time": self.world.now})

    def outside(self, tenant: str) -> None:
        """An agent of production on somebody else's model: text, no tokens, a price."""
        episode = self.episode("outside", tenant=tenant, awaits=[])
        body: dict[str, Any] = {"usage": {"prompt": 120, "completion": 30 + self.number % 7, "cached": 40}}
        body |= {"cost": 0.001 * (1 + self.number % 5), "untrainable_reason": "text only", "latency_us": 900 * MS}
        body |= {"request": orjson.dumps({"model": "big-model", "messages": ASKED})}
        call = self.call(episode, 0, engine=2, prompt=[], output=[], trainable=False, **body)
        self.put(episode, [episode.start(), call, episode.end()])

    def delegate(self, episode: Episode) -> None:
        """A sub-agent in a trace of its own."""
        sub = self.episode("sub", tenant=episode.tenant, trajectory=stable_id("sub", episode.root))
        sub.root, sub.group, sub.attempt, sub.source = episode.root, episode.group, episode.attempt, episode.source
        parent = {"parent_trajectory": episode.root, "spawn_call": f"tool-{episode.root}-0"}
        observed = sub.event("observation", OBSERVED, **parent)
        self.put(sub, [observed, self.call(sub, 0, lineage="sub", version=self.version, engine=1)])

    # -- events

    def call(self, episode: Episode, turn: int, *, engine: int = 0, version: int = 0, **fields: Any) -> dict[str, Any]:
        """A model call: its prompt and its reply grow with the turn and the sample."""
        sample = episode._start["sample"]
        name = f"{episode.trajectory}-{turn}"
        body: dict[str, Any] = {"prompt": list(range(3 + turn)), "output": list(range(10, 12 + int(str(sample))))}
        kind, release, incarnation = ENGINES[engine]
        told = {"engine": kind, "engine_version": release, "engine_incarnation": incarnation, "turn": turn}
        told |= {"latency_us": (40 + 30 * engine + 7 * turn) * MS, "ttft_us": (10 + 5 * engine) * MS}
        told |= {"usage": {"prompt": 3 + turn, "completion": 2 + int(str(sample)), "cached": 2 * turn}}
        told |= {"request": orjson.dumps({"model": POLICY, "messages": ASKED})}
        told |= {
            "response": orjson.dumps({"choices": [{"message": {"role": "assistant", "content": f"reply {turn}"}}]})
        }
        keys = ("prompt", "output", "version", "keep", "lineage", "supersedes", "trainable")
        body |= {"version": version} | {key: fields.pop(key) for key in keys if key in fields}
        event = episode.call(name, **body, changed=told | fields)
        return event

    def tool(self, episode: Episode, turn: int, ticket: int) -> None:
        """The agent uses a tool after a reply: it works, fails, runs out of time, or never answers."""
        name, id = ("search", "python")[turn % 2], f"tool-{episode.root}-{turn}"
        call = {"call_id": id, "name": name, "arguments": '{"q": 1}', "response_id": f"{episode.root}-{turn}"}
        self.put(episode, [episode.event("tool_call", call)])
        status = ("ok", "error", "ok", "timeout", None)[(ticket + turn) % 5]
        if status is not None:
            result = {"call_id": id, "name": name, "status": status, "content": f"{status}!", "tool_version": "1"}
            self.world.advance(20 * MS)
            self.put(episode, [episode.event("tool_result", result | {"latency_us": 20 * MS, "side_effect": None})])

    def put(self, episode: Episode, events: Sequence[dict[str, Any]]) -> None:
        """Events reach the log, with time passing between them."""
        for event in events:
            self.world.advance(50 * MS)
            numbered = event["source_seq"] is not None
            self.world.send("raw", episode.key, "Event", event, source=episode.source if numbered else "")
        self.world.drain()


ASKED = [{"role": "user", "content": "please"}]
OBSERVED = {"content": "seen", "media_type": "text/plain", "origin": "test"}
