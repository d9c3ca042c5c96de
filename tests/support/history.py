"""A small, whole world of one policy in a `MemoryBus`: every topic filled as the real processes fill it, by writers of
a few lines each, so that readers (audit, report, why) are tested against something that owes nothing to the stages.

It holds what a run holds: duplicates, a dead letter, an evaluation, an unsolicited group, tickets that failed, expired
and are still outstanding, a top-up, changes of B and eta, replies retried or withheld, aborted transactions."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from millrace.infra.log.base import Outgoing, Record
from millrace.infra.log.history.ledger import chain_entry
from millrace.infra.log.topics import partition_of, stages_of, turns_of
from millrace.schemas import codec
from millrace.schemas.chain import START, VERSION, event_hash
from tests.support.history_log import SECOND, SHARDS, SLOTS, Log, Out
from tests.support.history_records import POLICY, SIZE, completion, ledger_entry, model_call, trajectory
from tests.support.scored import evaluation

TENANT = "local"


class History(Log):
    """Builds and holds the world. `kind` names of topics are the logical ones without the policy."""

    def __init__(self, seed: int = 0, versions: int = 6) -> None:
        super().__init__(seed)
        self.batch, self.eta = 2, 1
        self.etas = [(0, 1)]
        self.version, self.seq_hi, self.seq, self.tickets = -1, 0, 0, 0
        self.weights: dict[str, Any] = {}
        self.entry: dict[str, Any] = {}
        self.outstanding: list[dict[str, Any]] = []
        self.ready: list[dict[str, Any]] = []
        self.numbers = self.prompts = 0
        self.chains: dict[str, tuple[bytes, int]] = {}
        self.sent: list[Outgoing] = []
        self.slot_chain: dict[int, bytes] = defaultdict(lambda: START)
        self.marks: dict[int, int] = defaultdict(lambda: -1)
        self.positions: dict[tuple[str, int, str, int], int] = defaultdict(int)
        self.turns: dict[tuple[str, int], int] = defaultdict(int)
        self.ahead: Counter[str] = Counter()
        """records of the turn in the making that are written already, by logical topic"""
        self.traces: dict[str, dict[str, Any]] = {}
        self.completed: set[str] = set()
        self.played: list[dict[str, Any]] = []
        self._build(versions)

    # -- turns

    def fresh(self, stage: str, slot: int, kind: str, partition: int) -> tuple[list[Record], list[dict[str, Any]]]:
        """What a stage's slot has not read yet of a partition, and the range that says so."""
        where = (stage, slot, kind, partition)
        records = list(self.bus.read(self.topic(kind), partition, self.positions[where]))
        if not records:
            return [], []
        self.positions[where] = records[-1].offset + 1
        name = self.topic(kind).partition(".")[2]
        span = {"topic": name, "partition": partition, "first": records[0].offset, "last": records[-1].offset}
        return records, [{**span, "count": len(records), "skipped": 0}]

    def turn(self, stage: str, slot: int, ranges: list[dict[str, Any]], outs: Sequence[Out]) -> None:
        """One turn: its outputs and what it says of itself, in one transaction."""
        number = self.turns[stage, slot]
        skipped = sum(span["skipped"] for span in ranges)
        name = stages_of(POLICY)[stage]
        record = {"stage": name, "slot": slot, "number": number, "now": self.now, "clock": None, "ranges": ranges}
        emitted = Counter(self.topic(out[0]).partition(".")[2] for out in outs) + self.ahead
        record |= {"emitted": dict(emitted), "duplicates": skipped}
        self.commit(outs, self.made_by(stage, slot))
        self.commit([(turns_of(stage), str(slot), "Turn", record, slot)])
        self.turns[stage, slot] += 1
        self.ahead.clear()

    def made_by(self, stage: str, slot: int) -> dict[str, bytes]:
        """The header of what the next turn writes."""
        return {"turn": f"{stages_of(POLICY)[stage]}/{slot}/{self.turns[stage, slot]}".encode()}

    # -- capture

    def speak(self, episode: Mapping[str, Any], kind: str, body: Mapping[str, Any], *, judge: bool = False) -> str:
        """One event into raw; returns its id."""
        trajectory = episode["trajectory"]
        prev, step = (START, 0) if judge else self.chains.get(trajectory, (START, 0))
        self.now += self.rng.randrange(100, 5000)
        event: dict[str, Any] = {
            "id": self.id("event"),
            "kind": kind,
            "tenant": TENANT,
            "policy": POLICY,
            "group": episode["group"],
            "root_trajectory": trajectory,
            "trajectory": trajectory,
            "parent_trajectory": None,
            "parent_event": None,
            "spawn_call": None,
            "attempt": episode["attempt"],
            "step": step,
            "actor": "evaluator" if judge else "gateway",
            "split": episode["split"],
            "event_time": self.now,
            "capture_time": self.now,
            "log_time": None,
            "source": "judge" if judge else "gateway-0",
            "source_epoch": 1,
            "source_seq": None if judge else self.numbers,
            "prev_hash": prev,
            "hash": b"",
            "hash_version": VERSION,
            "source_place": None,
            "source_hash": None,
            "trace_id": None,
            "span_id": None,
            "governance": None,
            "body_encoding": "plain",
            "body": codec.encode_body(kind, body),
        }
        event["hash"] = event_hash(prev, event)
        headers = {
            name: str(event[name]).encode() for name in ("id", "kind", "policy", "group", "trajectory", "source")
        }
        if not judge:
            self.chains[trajectory] = (event["hash"], step + 1)
            headers |= {"source-seq": str(self.numbers).encode(), "source-epoch": b"1"}
            self.numbers += 1
        key = f"{TENANT}/{episode['group']}".encode()
        out = Outgoing(self.topic("raw"), key, codec.encode("Event", event), headers)
        self.bus.publisher().publish(out)
        if not judge:
            self.sent.append(out)
        return str(event["id"])

    def repeat(self) -> None:
        """The forwarder sends what it sent last once more."""
        self.bus.publisher().publish(self.sent[-1])

    def rollout(self, episode: dict[str, Any]) -> None:
        """One attempt: a retried first reply, a second turn that drops a token of the lineage, an end, a reward."""
        grant = episode["grant"]
        body = {"task_id": episode["task"], "task": "{}", "ticket": grant["ticket"] if grant else None}
        body |= {"group_size": SIZE, "sample": episode["sample"], "deadline": grant["deadline"] if grant else None}
        body |= {"min_version": grant["min_version"] if grant else 0, "awaits": ["verifier"], "mode": "online"}
        body |= {"reward_deadline_ms": 60_000}
        body["versions"] = {"agent": "a", "harness": "h", "prompt": "p", "tools": {}}
        self.speak(episode, "episode_started", body)
        lineage, kept = self.id("lineage"), 0
        superseded = None
        for number in range(3):
            prompt = [self.rng.randrange(1000) for _ in range(self.rng.randrange(2, 5))]
            output = [self.rng.randrange(1000) for _ in range(self.rng.randrange(2, 6))]
            response = self.id("response")
            withheld = episode["withheld"] and number == 2
            self.call(episode, lineage, response, number, kept, prompt, output, superseded, withheld)
            superseded = response if number == 0 and self.rng.random() < 0.5 else None
            kept = 0 if superseded else kept + len(prompt) + len(output) - (1 if number == 1 else 0)
            if self.rng.random() < 0.2:
                self.repeat()
        end = {"status": "completed", "stop_condition": "returned", "steps": 4, "output": "x", "reason": None}
        end |= {"whole": True, "task_id": episode["task"], "task": "{}", "awaits": ["verifier"]}
        self.speak(episode, "episode_ended", end)
        self.speak(episode, "reward", self.judgement(episode), judge=True)
        self.played.append(episode)

    def replay(self, rubric: str) -> None:
        """Another verifier judges everything again, long after it was sealed."""
        for episode in self.played:
            again = self.judgement(episode) | {"rubric_version": rubric, "replay": f"again-{rubric}"}
            self.speak(episode, "reward", again, judge=True)
        self.step()

    def call(
        self,
        episode: Mapping[str, Any],
        lineage: str,
        response: str,
        turn: int,
        kept: int,
        prompt: list[int],
        output: list[int],
        supersedes: str | None,
        withheld: bool,
    ) -> None:
        low = episode["grant"]["min_version"] if episode["grant"] else self.version
        versions = sorted(self.rng.randint(low, self.version) for _ in output)
        logprobs = [-self.rng.random() for _ in output]
        body = model_call(self.id("call"), response, lineage, turn, kept, prompt, output, logprobs, versions)
        if withheld:
            body |= {"trainable": False, "untrainable_reason": "redacted"}
        self.speak(episode, "model_call", body | {"supersedes": supersedes})

    def judgement(self, episode: Mapping[str, Any]) -> dict[str, Any]:
        value = min(1.0, max(0.0, self.rng.gauss(0.2 + 0.1 * self.version, 0.2)))
        judged = {"reward_id": self.id("reward"), "target_kind": "trajectory", "target": episode["trajectory"]}
        judged |= {"span_start": None, "span_end": None, "source": "verifier", "source_version": "1"}
        judged |= {"rubric_version": "1", "value": value, "components": {}, "label": None, "failure": None}
        return judged | {"critique": None, "supersedes": None, "independent": True, "observed_at": self.now}

    def episode(self, group: str, sample: int, grant: Mapping[str, Any] | None, split: str = "train") -> dict[str, Any]:
        withheld = split == "train" and self.rng.random() < 0.15
        episode = {"group": group, "sample": sample, "grant": grant, "split": split, "withheld": withheld}
        episode |= {"trajectory": self.id("trajectory"), "attempt": self.id("attempt"), "task": f"task-{group}"}
        if split == "evaluation" or (grant is None and sample == 0):
            episode["group"] = group
        return episode

    # -- refine

    def refine(self) -> None:
        for slot in range(SLOTS):
            records, ranges = self.fresh("refine", slot, "raw", slot)
            if not records:
                continue
            outs: list[Out] = []
            for record in records:
                number = int(record.headers.get("source-seq", b"-1"))
                if 0 <= number <= self.marks[slot]:
                    ranges[0]["count"] -= 1
                    ranges[0]["skipped"] += 1
                    continue
                self.marks[slot] = max(number, self.marks[slot])
                outs.append(self.refined(slot, record))
            self.now += SECOND
            progress = {"stage": "refine", "slot": slot, "time": self.now}
            outs.append(("events", f"progress/{slot}", "Progress", progress, slot))
            self.turn("refine", slot, ranges, outs)

    def refined(self, slot: int, record: Record) -> Out:
        key = record.key.decode()
        if not record.value or record.value[:2] != codec.MARK:
            letter = {"id": self.id("letter"), "stage": "refine", "place": record.place._asdict()}
            letter |= {"reason": "undecodable", "detail": "no record of ours", "event_id": None, "policy": None}
            letter |= {"tenant": None, "group": None, "trajectory": None, "time": self.now}
            return "dead-letters", key, "DeadLetter", letter, slot
        event = codec.decode_as("Event", record.value)
        held = event["kind"] == "model_call" and not codec.decode_body("model_call", event["body"])["trainable"]
        governance = {"eligibility": "audit_only" if held else "tenant_only", "reason": "redacted" if held else "rule"}
        governance |= {"classification": "internal", "redaction": "applied" if held else "none_needed"}
        governance |= {"redaction_version": "1", "policy_version": "1", "counts": {}, "findings": []}
        governance |= {"retention_until": None, "residency": None}
        event |= {"log_time": self.now, "source_place": record.place._asdict(), "source_hash": event["hash"]}
        event |= {"governance": governance, "prev_hash": self.slot_chain[slot]}
        event["hash"] = self.slot_chain[slot] = event_hash(self.slot_chain[slot], event)
        return "events", key, "Event", event, slot

    # -- seal

    def seal(self) -> None:
        for slot in range(SLOTS):
            records, ranges = self.fresh("seal", slot, "events", slot)
            for record in records:
                name, event = codec.decode(record.value or b"")
                if name == "Event" and not _replayed(event):
                    trace = self.traces.setdefault(event["trajectory"], {"events": [], "rewards": []})
                    trace["events"].append((event, record.place))
            if records:
                self.turn("seal", slot, ranges, self.completions(slot))

    def completions(self, slot: int) -> list[Out]:
        """Evaluations and the completions of whole groups; trajectories of a group are sent first, for their places."""
        groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for trace in self.traces.values():
            kinds = [event["kind"] for event, _ in trace["events"]]
            if "episode_ended" in kinds and "reward" in kinds:
                sample = trajectory(trace["events"], self.now)
                groups[sample["group"]].append(sample)
        outs: list[Out] = []
        for group, samples in groups.items():
            if group in self.completed or partition_of(f"{TENANT}/{group}", SLOTS) != slot:
                continue
            if samples[0]["split"] == "evaluation":
                self.completed.add(group)
                outs.append(("evaluations", group, "Trajectory", samples[0], None))
            elif len(samples) == SIZE:
                self.completed.add(group)
                samples.sort(key=lambda sample: sample["sample"])
                sealed: list[Out] = [("trajectories", group, "Trajectory", sample, None) for sample in samples]
                places = self.commit(sealed, self.made_by("seal", slot))
                self.ahead[f"{POLICY}.trajectories"] += len(sealed)
                outs.append(("completions", group, "Completion", completion(slot, samples, places, self.now), 0))
        progress = {"kind": "progress", "policy": POLICY, "slot": slot, "time": self.now, "group": "", "ticket": None}
        progress |= {"size": 0, "samples": [], "missing": [], "trajectories": [], "tokens": [], "rewards": []}
        outs.append(("completions", "", "Completion", {**progress, "v_head": -1, "v_tail": -1, "reason": None}, 0))
        return outs

    # -- dispatch

    def grant(self, samples: Sequence[int] = range(SIZE), again: Mapping[str, Any] | None = None) -> dict[str, Any]:
        grant: dict[str, Any] = {**again} if again else {"ticket": self.tickets, "policy": POLICY}
        if again:
            grant |= {"round": grant["round"] + 1, "samples": list(samples)}
        else:
            self.tickets += 1
            grant |= {"prompt_id": f"prompt-{grant['ticket']}", "task": "{}", "group_size": SIZE, "round": 0}
            self.ask(grant["prompt_id"])
            grant |= {"samples": list(samples), "min_version": self.version, "deadline": self.version + self.eta}
            grant |= {"lease_until": self.now + 300 * SECOND, "reward_deadline_ms": 60_000, "awaits": ["verifier"]}
        grant["time"] = self.now
        ticket = grant["ticket"]
        self.turn("dispatch", 0, [], [("grants", str(ticket), "Grant", grant, ticket % SLOTS)])
        return grant

    def ask(self, id: str) -> None:
        """A prompt, as a loader writes it."""
        prompt = {"id": id, "policy": POLICY, "number": self.prompts, "task": "{}", "group_size": None, "awaits": []}
        self.commit([("prompts", id, "Prompt", prompt, 0)])
        self.prompts += 1

    def resolution(self, kind: str, **fields: Any) -> dict[str, Any]:
        record: dict[str, Any] = {"kind": kind, "policy": POLICY, "ticket": None, "seq": None, "group": ""}
        record |= {"prompt_id": None, "solicited": True, "size": SIZE, "trajectories": [], "tokens": [], "rewards": []}
        record |= {"v_head": -1, "v_tail": -1, "min_version": 0, "deadline": 0, "reason": None, "setting": None}
        return record | {"time": self.now} | fields

    def dispatch(self) -> None:
        records, ranges = self.fresh("dispatch", 0, "completions", 0)
        outs: list[Out] = []
        for record in records:
            completion = codec.decode_as("Completion", record.value or b"")
            if completion["kind"] in ("complete", "unsolicited"):
                outs.append(self.resolved(completion))
        for side in ("ledger", "decisions", "prompts"):
            _, more = self.fresh("dispatch", 0, side, 0)
            ranges += more
        if ranges:
            self.turn("dispatch", 0, ranges, outs)

    def resolved(self, completion: Mapping[str, Any]) -> Out:
        ticket = completion["ticket"]
        solicited = ticket is not None
        grant = next((g for g in self.outstanding if g["ticket"] == ticket), None)
        if grant is not None:
            self.outstanding.remove(grant)
        else:
            ticket = self.tickets
            self.tickets += 1
        copied = {name: completion[name] for name in ("group", "trajectories", "tokens", "rewards", "v_head", "v_tail")}
        low = grant["min_version"] if grant else completion["v_head"]
        deadline = grant["deadline"] if grant else low + self.eta
        prompt = grant["prompt_id"] if grant else None
        terms = {"min_version": low, "deadline": deadline, "prompt_id": prompt, "solicited": solicited}
        ready = self.resolution("ready", ticket=ticket, seq=self.seq, **copied, **terms)
        self.seq += 1
        self.ready.append(ready)
        return "resolutions", ready["group"], "Resolution", ready, 0

    def negative(self, grant: Mapping[str, Any], kind: str, reason: str) -> None:
        self.outstanding.remove(dict(grant))
        if kind == "expired":
            self.now = max(self.now, grant["lease_until"])
        fields = {name: grant[name] for name in ("ticket", "prompt_id", "min_version", "deadline")}
        record = self.resolution(kind, group=f"ticket-{grant['ticket']}", reason=reason, **fields)
        self.turn("dispatch", 0, [], [("resolutions", record["group"], "Resolution", record, 0)])

    def change(self, name: str, value: int) -> None:
        """Someone asks for another B or eta; it holds from the next boundary or ticket on."""
        decision = {"id": self.id("decision"), "kind": "setting", "policy": POLICY, "name": name}
        decision |= {"value": json.dumps(value), "reason": "try", "author": "someone", "time": self.now}
        self.commit([("decisions", name, "Decision", decision, 0)])
        setting = {"name": name, "value": json.dumps(value), "decision": decision["id"]}
        setting |= {"from_seq": self.seq_hi if name == "batch" else None}
        setting |= {"from_ticket": self.tickets if name == "eta" else None}
        changed = self.resolution("setting", setting=setting)
        self.turn("dispatch", 0, [], [("resolutions", "setting", "Resolution", changed, 0)])
        setattr(self, name, value)
        if name == "eta":
            self.etas.append((self.tickets, value))

    def eta_of(self, ticket: int) -> int:
        """The bound that a ticket was granted under."""
        return [eta for first, eta in self.etas if first <= ticket][-1]

    # -- learner

    def learn(self) -> None:
        while len(self.ready) >= self.batch:
            batch, self.ready = self.ready[: self.batch], self.ready[self.batch :]
            self.commit_version(batch)

    def commit_version(self, batch: list[dict[str, Any]]) -> None:
        parent, version = self.version, self.version + 1
        low, high = self.seq_hi, self.seq_hi + len(batch)
        digest = f"{self.rng.getrandbits(256):064x}"
        first = {"batch": self.batch, "eta": self.eta, "shards": SHARDS, "group_size": SIZE}
        self.weights = {"policy": POLICY, "version": version, "parent": parent if version else None, "mode": "full"}
        self.weights |= {"uri": f"memory://weights/v{version}-{digest[:12]}", "digest": digest, "files": {}}
        self.weights |= {"tokenizer_hash": "t", "template_hash": "c", "seq_lo": low, "seq_hi": high, "time": self.now}
        self.weights |= first if version == 0 else dict.fromkeys(first)
        eta = max((self.eta_of(group["ticket"]) for group in batch), default=self.eta)
        entry = ledger_entry(version, low, batch, digest, eta, self.now)
        self.entry = dict(chain_entry(entry, self.entry.get("hash", b"")))  # type: ignore[arg-type]
        self.now += SECOND
        self.commit(
            [
                ("weights", POLICY, "WeightVersion", self.weights, 0),
                ("ledger", str(version), "LedgerEntry", self.entry, 0),
            ]
        )
        self.version, self.seq_hi = version, high

    # -- the whole

    def play(self, group: str, grant: Mapping[str, Any] | None, samples: Sequence[int] = range(SIZE)) -> None:
        for sample in samples:
            self.rollout(self.episode(group, sample, grant))
        self.step()

    def step(self) -> None:
        self.refine()
        self.seal()
        self.dispatch()
        self.learn()

    def _build(self, versions: int) -> None:
        self.commit_version([])
        self.status("engine-0", "engine", 0)
        step = 0
        while self.version < versions:
            step += 1
            while self.seq - self.seq_hi + len(self.outstanding) < (self.eta + 1) * self.batch:
                self.outstanding.append(self.grant())
            grant = self.outstanding[0]
            group = f"ticket-{grant['ticket']}"
            match step:
                case 2:
                    self.negative(grant, "expired", "lease ran out")
                case 4:
                    self.play(group, grant, [0])
                    self.outstanding[0] = self.grant([1], again=grant)
                    self.play(group, self.outstanding[0], [1])
                case 5:
                    self.bus.publisher().publish(Outgoing(self.topic("raw"), b"local/bad", b"not avro", {}))
                    self.rollout(self.episode(self.id("evaluation"), 0, None, "evaluation"))
                    self.play(group, grant)
                case 6:
                    self.negative(grant, "failed", "every attempt failed")
                    self.change("eta", 2)
                case 7:
                    self.play(group, grant)
                    self.play(self.id("wild"), None)
                case _:
                    self.play(group, grant)
            if step == 9:
                self.change("batch", 3)
            self.status("engine-0", "engine", self.version)
        for _, entry in self.rows("ledger")[1::2]:
            scored = evaluation(POLICY, entry)
            self.commit([("scores", str(entry["version"]), "Evaluation", scored, 0)])

    def status(self, worker: str, role: str, version: int) -> None:
        record = {"worker": worker, "incarnation": f"{worker}/1", "role": role, "state": "serving", "policy": POLICY}
        record |= {"version": version, "label": f"{POLICY}@{version}", "url": None, "host": "localhost", "pid": 1}
        record |= {"error": None, "expires_at": self.now + 30 * SECOND, "time": self.now}
        self.commit([("workers", worker, "WorkerStatus", record, 0)])


def _replayed(event: Mapping[str, Any]) -> bool:
    return event["kind"] == "reward" and codec.decode_body("reward", event["body"])["replay"] is not None
