"""Seal: events in, sealed trajectories and what became of their groups out.

Invariants:

- The first ended attempt of a sample in partition order is the sample; every other attempt ends as one dead letter.
- A sample is sealed once: with all the rewards it awaits, or at its reward deadline with those it has. What comes later
  is a dead letter and changes nothing.
- A group is closed once, in one transaction with all its trajectories, and leaves a tombstone for a while.
- Time comes from the events alone, and is passed on to `completions` with every progress record.
- A reward that a replay made from history is passed over: it counts for no sample, changes none and flaws none.
- A top-up gives back the samples that were not good; everything else of the group stays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

from millrace.infra import telemetry
from millrace.infra.log.base import Record
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.topics import NAME, logical_name
from millrace.infra.stages.base import Clear, Emit, Key, Op, Stage, View, Wake, require
from millrace.infra.stages.letters import UNFOLDABLE
from millrace.schemas import codec
from millrace.schemas.errors import SchemaError
from millrace.schemas.ids import Micros
from millrace.schemas.records import (
    Body,
    Completion,
    CompletionKind,
    Decision,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    ModelCall,
    Place,
    Progress,
    Reward,
)
from millrace.streams.decoding import Decoder, Unreadable, dead_letter, place_of
from millrace.streams.seal import attempts as state
from millrace.streams.seal.attempts import ATTEMPTS, CALLS, GROUPS, TOMBSTONES, Attempt, OpenGroup
from millrace.streams.seal.group_outcome import ClosingRules, EndedSample, completion, sample_of, verdict, why_bad
from millrace.streams.seal.policy_terms import POLICIES, SETTING, parse, policies, policy_key, rules_of
from millrace.streams.seal.rewards import silent_sources, take

KINDS = frozenset({"episode_started", "episode_ended", "model_call", "reward", "gap"})
"""kinds that sealing needs; the others are history"""
TRACES = 512
"""contexts of samples that travel with a group's completion: headers have no room for any number"""
CONTEXT_BYTES = 64
"""bytes of a W3C trace context, and a few more"""
REFUSALS = {
    "duplicate_reward": "this judgement was counted before",
    "too_many_rewards": "its episode keeps no more rewards of such sources",
}
"""why a judgement does not count"""


class Seal(Stage):
    """Serves the policies that `decisions` name, each by its own terms (`policies`), and `policies` by `rules` from
    the start; events of others are history only."""

    name = "seal"
    primary = "events"
    sides = ("decisions",)

    def __init__(
        self, policies: Sequence[str] = (), rules: ClosingRules | None = None, claims: ClaimStore | None = None
    ) -> None:
        self._policies = frozenset(policies)
        self._rules = rules or ClosingRules()
        self._decode = Decoder(claims)

    def time_of(self, view: View, record: Record) -> Micros | None:
        if logical_name(record.topic) != self.primary:
            return None
        try:
            name, content = self._decode(record)
        except Unreadable:
            return None
        if name == "Progress":
            return cast(Progress, content)["time"]
        return cast(Event, content)["log_time"] if name == "Event" else None

    def on_record(self, view: View, record: Record, now: Micros) -> Iterable[Op]:
        if logical_name(record.topic) != self.primary:
            yield from self._decision(view, record, now)
            return
        try:
            name, content = self._decode(record)
            event = cast(Event, content) if name == "Event" else None
            body = codec.decode_body(event["kind"], event["body"]) if event and self._matters(event) else None
        except (Unreadable, SchemaError) as error:
            code, detail = (error.code, str(error)) if isinstance(error, Unreadable) else ("undecodable_body", "")
            key = record.key.decode("utf-8", "replace")
            yield dead_letter(self.name, place_of(record), code, detail, now, key=key, partition=view.slot)
            return
        if name == "Progress":
            yield from self._progress(view, now)
        elif event is not None:
            yield from self._event(view, record, event, body, now)

    def on_wake(self, view: View, key: str, now: Micros) -> Iterable[Op]:
        if TOMBSTONES.match(key):
            yield Clear(key)
        elif root := ATTEMPTS.match(key):
            attempt = view.get(root)
            if attempt is not None and attempt["status"] is not None and attempt["closed"] is None:
                yield from self._settle(view, attempt, now)
        elif group := GROUPS.match(key):
            yield from self._close(view, group, now)

    def on_unfoldable(self, view: View, key: str, now: Micros) -> Iterable[Op]:
        """A group that cannot be closed, or settled, ends as a dead letter of each of its attempts."""
        if TOMBSTONES.match(key):
            yield Clear(key)
            return
        root = ATTEMPTS.match(key)
        attempt = view.get(root) if root else None
        group_key = state.group_key(attempt) if attempt else GROUPS.match(key)
        group = view.get(group_key) if group_key else None
        if group_key is not None and group is not None:
            yield from self._forget(view, group, set(), now, UNFOLDABLE, "its group cannot be closed")
            yield from self._bury(view, group_key, group["policy"], now)

    def ids_of(self, view: View, what: Record | str) -> Mapping[str, object]:
        if isinstance(what, str):
            root, group = ATTEMPTS.match(what), GROUPS.match(what)
            entry = view.get(root) if root else view.get(group) if group else None
            return entry or {}
        name, event = self._decode(what)
        return event if name == "Event" else {}

    # -- policies

    def _decision(self, view: View, record: Record, now: Micros) -> Iterator[Op]:
        try:
            name, content = self._decode(record)
        except Unreadable:
            return  # dispatch says so in a dead letter of its own
        decision = cast(Decision, content)
        if name != "Decision" or decision["kind"] != "setting" or decision["name"] != SETTING:
            return
        terms = parse(decision["value"])
        # Every slot reads the decision, and one of them answers for all.
        policy = decision["policy"] or ""
        if terms is not None and NAME.fullmatch(policy):
            yield POLICIES.put(policy_key(policy), terms)
        elif view.slot == 0:
            key = record.key.decode("utf-8", "replace")
            detail = f"{SETTING} cannot have this value, or names no policy"
            yield dead_letter(self.name, place_of(record), "bad_setting", detail, now, key=key, partition=view.slot)

    def _serves(self, view: View, policy: str) -> bool:
        return policy in self._policies or view.get(policy_key(policy)) is not None

    def _rules_of(self, view: View, policy: str) -> ClosingRules:
        terms = view.get(policy_key(policy))
        return self._rules if terms is None else rules_of(terms, self._rules)

    # -- events

    def _matters(self, event: Event) -> bool:
        return event["kind"] in KINDS and event["body_encoding"] == "plain"

    def _progress(self, view: View, now: Micros) -> Iterator[Op]:
        for policy in sorted(self._policies.union(policies(view))):
            progress: Completion = {
                "kind": "progress",
                "policy": policy,
                "slot": view.slot,
                "time": now,
                "group": "",
                "ticket": None,
                "size": 0,
                "samples": [],
                "missing": [],
                "trajectories": [],
                "tokens": [],
                "rewards": [],
                "v_head": -1,
                "v_tail": -1,
                "reason": None,
            }
            yield Emit(f"{policy}.completions", f"progress/{view.slot}", "Completion", progress)

    def _event(self, view: View, record: Record, event: Event, body: Body | None, now: Micros) -> Iterator[Op]:
        root = state.attempt_key(event, event["root_trajectory"])
        attempt = view.get(root)
        kind = event["kind"]
        if kind == "reward" and body and cast(Reward, body)["replay"] is not None:
            return
        if kind == "episode_started" and event["trajectory"] == event["root_trajectory"] and body:
            yield from self._start(view, record, event, cast(EpisodeStarted, body), now)
            return
        if attempt is None or attempt["group"] != event["group"]:
            yield from self._orphan(view, record, event, now)
            return
        if attempt["closed"] is not None:
            if kind == "reward":
                yield self._letter(view, record, event, attempt["closed"], "its attempt did not count", now)
            return
        flaw = state.flaw_of(event) or (None if body or kind not in KINDS else "sealed_body")
        if flaw is not None and attempt["flaw"] is None:
            attempt = {**attempt, "flaw": flaw}
            yield ATTEMPTS.put(root, attempt)
        if not body:
            return
        if kind == "reward":
            yield from self._reward(view, record, event, cast(Reward, body), attempt, now)
        elif attempt["status"] is not None:
            if kind in ("model_call", "episode_ended"):
                yield self._letter(view, record, event, "after_end", "the attempt had ended", now)
        elif kind == "model_call":
            yield CALLS.append(
                state.calls_key(attempt, attempt["trajectory"]),
                state.call_of(event, cast(ModelCall, body), attempt["policy"], place_of(record)),
            )
        elif kind == "episode_ended" and event["trajectory"] == event["root_trajectory"]:
            yield from self._end(view, record, event, cast(EpisodeEnded, body), attempt, now)

    def _orphan(self, view: View, record: Record, event: Event, now: Micros) -> Iterator[Op]:
        """An event whose attempt is not known: too late, or never started. History-only kinds need no disposition."""
        if event["kind"] not in KINDS or not self._serves(view, event["policy"]):
            return
        is_late = view.get(state.tombstone_key(state.group_key(event))) is not None
        if is_late and event["kind"] == "reward":
            yield self._letter(view, record, event, "late_reward", "its sample was sealed before it came", now)
        elif not is_late:
            yield self._letter(view, record, event, "orphan", "no attempt of this trajectory has started", now)

    def _start(self, view: View, record: Record, event: Event, body: EpisodeStarted, now: Micros) -> Iterator[Op]:
        refusal = self._refusal(view, event, body)
        if refusal is not None:
            yield self._letter(view, record, event, *refusal, now)
            return
        key = state.group_key(event)
        group = view.get(key)
        if group is None:
            group = state.group_of(event, body)
            yield Wake(key, now + self._rules_of(view, event["policy"]).patience)
        attempt = state.attempt_of(event, body, place_of(record), _trace_of(record))
        attempt["flaw"] = state.flaw_of(event)
        yield ATTEMPTS.put(state.attempt_key(attempt, attempt["trajectory"]), attempt)
        yield GROUPS.put(key, {**group, "attempts": [*group["attempts"], attempt["trajectory"]]})

    def _refusal(self, view: View, event: Event, body: EpisodeStarted) -> tuple[str, str] | None:
        if not self._serves(view, event["policy"]):
            return "unknown_policy", "nobody has announced such a policy here"
        if view.get(state.attempt_key(event, event["root_trajectory"])) is not None:
            return "duplicate_start", "the trajectory has already started"
        key = state.group_key(event)
        if view.get(state.tombstone_key(key)) is not None:
            return "superseded", "the group was sealed before this attempt began"
        code = state.refusal(view.get(key) or state.group_of(event, body), event, body)
        return None if code is None else (code, "the attempt does not fit its group")

    def _end(
        self,
        view: View,
        record: Record,
        event: Event,
        body: EpisodeEnded,
        attempt: Attempt,
        now: Micros,
    ) -> Iterator[Op]:
        key, root = state.group_key(attempt), state.attempt_key(attempt, attempt["trajectory"])
        group = require(view, key)
        sample = str(attempt["sample"])
        if sample in group["winners"]:
            yield self._letter(view, record, event, "superseded", "another attempt of the sample ended first", now)
            yield from self._drop(attempt, "superseded")
            return
        flaw = attempt["flaw"] or (None if body["whole"] else "gap")
        attempt = {**attempt, "status": body["status"], "flaw": flaw}
        yield ATTEMPTS.put(root, attempt)
        yield GROUPS.put(key, {**group, "winners": {**group["winners"], sample: attempt["trajectory"]}})
        if silent_sources(attempt["awaits"], attempt["rewards"], group["rewards"]) and attempt["wait"] > 0:
            yield Wake(root, now + attempt["wait"])
        else:
            yield from self._settle(view, attempt, now)

    def _reward(
        self,
        view: View,
        record: Record,
        event: Event,
        body: Reward,
        attempt: Attempt,
        now: Micros,
    ) -> Iterator[Op]:
        key, root = state.group_key(attempt), state.attempt_key(attempt, attempt["trajectory"])
        group = require(view, key)
        is_shared = body["target_kind"] == "group"
        if not self._known_target(view, event, body, attempt):
            yield self._letter(view, record, event, "unknown_target", "its target is not of this trajectory", now)
            return
        result = take(group["rewards"] if is_shared else attempt["rewards"], body, place_of(record), attempt["awaits"])
        if result.refusal is not None:
            yield self._letter(view, record, event, result.refusal, REFUSALS[result.refusal], now)
            return
        if result.former is not None:
            former: Attempt = {**attempt, "id": None}
            yield self._place_letter(
                view, result.former["place"], former, "superseded_reward", "a later judgement corrects it", now
            )
        if is_shared:
            yield GROUPS.put(key, {**group, "rewards": result.judgements})
        else:
            attempt = {**attempt, "rewards": result.judgements}
            yield ATTEMPTS.put(root, attempt)
        waiting = (
            [view.get(state.attempt_key(group, name)) for name in group["winners"].values()] if is_shared else [attempt]
        )
        for one in waiting:
            open_group = view.get(key)
            if open_group is None:
                return
            if one is None or one["status"] is None or one["sample"] in open_group["settled"]:
                continue
            if not silent_sources(one["awaits"], one["rewards"], open_group["rewards"]):
                yield from self._settle(view, one, now)

    def _known_target(self, view: View, event: Event, body: Reward, attempt: Attempt) -> bool:
        target = body["target"]
        match body["target_kind"]:
            case "trajectory":
                return target in (attempt["trajectory"], event["trajectory"])
            case "group":
                return target == attempt["group"]
            case "tool_call":
                return True
            case _:
                return any(
                    target == call["response"] for call in view.items(state.calls_key(attempt, attempt["trajectory"]))
                )

    # -- groups

    def _settle(self, view: View, attempt: Attempt, now: Micros) -> Iterator[Op]:
        """Nothing more is awaited for a sample that ended."""
        key = state.group_key(attempt)
        group = state.settle(require(view, key), attempt["sample"])
        yield Wake(state.attempt_key(attempt, attempt["trajectory"]), None)
        yield GROUPS.put(key, group)
        if state.is_complete(group):
            yield from self._close(view, key, now)

    def _close(self, view: View, key: Key[OpenGroup], now: Micros) -> Iterator[Op]:
        group = view.get(key)
        if group is None:
            return
        rules = self._rules_of(view, group["policy"])
        samples = []
        for number, root in sorted((int(number), root) for number, root in group["winners"].items()):
            calls = view.items(state.calls_key(group, root))
            attempt = require(view, state.attempt_key(group, root))
            samples.append(sample_of(number, attempt, calls, group, rules, now))
        kind = verdict(group, samples, rules)
        if kind == "top_up":
            yield from self._top_up(view, key, group, samples, now)
            return
        topic = "evaluations" if group["split"] == "evaluation" else "trajectories"
        for sample in samples:
            yield Emit(
                f"{group['policy']}.{topic}",
                group["group"],
                "Trajectory",
                sample.record,
                headers=_headers(group, sample),
                ref=sample.ref,
            )
        if kind is not None:
            yield self._completion(view, kind, group, samples, now)
        winners = set(group["winners"].values())
        yield from self._forget(view, group, winners, now, "superseded", "its group was closed without it")
        yield from self._bury(view, key, group["policy"], now)

    def _bury(self, view: View, key: Key[OpenGroup], policy: str, now: Micros) -> Iterator[Op]:
        """Forget a group that is closed, but for its tombstone."""
        yield Clear(key)
        tombstone = state.tombstone_key(key)
        yield TOMBSTONES.put(tombstone, True)
        yield Wake(tombstone, now + self._rules_of(view, policy).memory)

    def _top_up(
        self, view: View, key: Key[OpenGroup], group: OpenGroup, samples: Sequence[EndedSample], now: Micros
    ) -> Iterator[Op]:
        good_winners = {
            str(sample.number): group["winners"][str(sample.number)] for sample in samples if sample.is_good
        }
        for sample in samples:
            if not sample.is_good:
                attempt = require(view, state.attempt_key(group, sample.record["id"]))
                yield self._place_letter(
                    view, attempt["place"], attempt, "failed_sample", f"asked for again: {why_bad(sample)}", now
                )
                yield from self._drop(attempt, "failed_sample")
        yield self._completion(view, "top_up", group, samples, now)
        settled_samples = [number for number in group["settled"] if str(number) in good_winners]
        yield GROUPS.put(
            key, {**group, "round": group["round"] + 1, "winners": good_winners, "settled": settled_samples}
        )
        yield Wake(key, now + self._rules_of(view, group["policy"]).patience)

    def _completion(
        self, view: View, kind: CompletionKind, group: OpenGroup, samples: Sequence[EndedSample], now: Micros
    ) -> Emit:
        headers = {"group": group["group"], "kind": kind, "policy": group["policy"]}
        traces = ",".join([sample.trace for sample in samples if sample.trace][:TRACES])
        return Emit(
            f"{group['policy']}.completions",
            group["group"],
            "Completion",
            completion(kind, group, samples, view.slot, now),
            headers=headers | ({telemetry.MANY: traces} if traces else {}),
        )

    def _forget(
        self, view: View, group: OpenGroup, winners: set[str], now: Micros, code: str, detail: str
    ) -> Iterator[Op]:
        """Clear every attempt of a group; winners aside, one that has no end yet ends here."""
        for root in group["attempts"]:
            attempt = view.get(state.attempt_key(group, root))
            if attempt is not None and attempt["closed"] is None and root not in winners:
                yield self._place_letter(view, attempt["place"], attempt, code, detail, now)
            yield Clear(state.attempt_key(group, root))
            yield Clear(state.calls_key(group, root))

    def _drop(self, attempt: Attempt, why: str) -> Iterator[Op]:
        """Forget the calls of an attempt that does not count, and remember that it does not."""
        yield Clear(state.calls_key(attempt, attempt["trajectory"]))
        yield Wake(state.attempt_key(attempt, attempt["trajectory"]), None)
        yield ATTEMPTS.put(state.attempt_key(attempt, attempt["trajectory"]), {**attempt, "closed": why, "rewards": {}})

    # -- dead letters

    def _letter(self, view: View, record: Record, event: Event, code: str, detail: str, now: Micros) -> Emit:
        return self._place_letter(view, place_of(record), event, code, detail, now)

    def _place_letter(
        self, view: View, place: Place, event: Event | Attempt, code: str, detail: str, now: Micros
    ) -> Emit:
        key = f"{event['tenant']}/{event['group']}"
        return dead_letter(self.name, place, code, detail, now, key=key, event=event, partition=view.slot)


def _trace_of(record: Record) -> str | None:
    """The context that a record carries, None for none or for one that is too long to be one."""
    trace = record.headers.get("traceparent")
    return trace.decode("ascii", "replace") if trace and len(trace) <= CONTEXT_BYTES else None


def _headers(group: OpenGroup, sample: EndedSample) -> dict[str, str]:
    headers = {
        "id": sample.record["id"],
        "policy": group["policy"],
        "group": group["group"],
        "trajectory": sample.record["id"],
    }
    if group["ticket"] is not None:
        headers["ticket"] = str(group["ticket"])
    if sample.trace:
        headers["traceparent"] = sample.trace
    return headers
