"""Laws about what was trained on: exact tokens, their versions within bounds, and only what may be learned from.

The prefix rule, by which a lineage is built again from its model calls: a call takes the first `prefix_len` tokens of
its lineage, drops what lies beyond, then adds its prompt ids (nothing trains) and its output ids (sampled by the
policy). Invariants: arrays of one lineage have one length T; log-probabilities count where the mask is 1; versions are
-1 where nothing was sampled."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millrace.consumers.audit.facts import HARD, Facts
from millrace.consumers.audit.law import INELIGIBLE, Floats, Ints, Law, SealedSample, SealedTrace
from millrace.infra.log.history.rows import Mark, Row
from millrace.schemas.arrays import unpack
from millrace.schemas.records import Event, LedgerEntry, Trajectory

TRAINABLE = frozenset({"tenant_only", "aggregate"})
"""eligibilities that may train"""


@dataclass(frozen=True, slots=True)
class LineageArrays:
    """What the calls say: int32[T] tokens, float32[T] logprobs, int32[T] versions, and per token the response id that
    sampled it ("" for none). `error` says why it cannot be built."""

    tokens: Ints
    logprobs: Floats
    versions: Ints
    made_by: Sequence[str]
    error: str | None = None


def rebuild(trace: SealedTrace, calls: Sequence[Row | None]) -> LineageArrays:
    """Apply the calls of this lineage in its own order."""
    by_response = {
        call.body["response_id"]: call for call in calls if call is not None and call.body["lineage"] == trace.id
    }
    tokens, logprobs, versions = np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32)
    made_by: list[str] = []
    for response in trace.calls:
        call = by_response.get(response)
        if call is None:
            return LineageArrays(tokens, logprobs, versions, made_by, f"reply {response} is among none of its events")
        body = call.body
        keep = body["prefix_len"]
        if keep > len(tokens):
            error = f"reply {response} keeps {keep} of {len(tokens)} tokens"
            return LineageArrays(tokens, logprobs, versions, made_by, error)
        prompt, output = unpack(body["prompt_ids"]), unpack(body["output_ids"])
        blank = np.zeros(len(prompt), np.float32)
        tokens = np.concatenate([tokens[:keep], prompt, output])
        logprobs = np.concatenate([logprobs[:keep], blank, unpack(body["output_logprobs"])])
        versions = np.concatenate(
            [versions[:keep], np.full(len(prompt), -1, np.int32), unpack(body["output_versions"])]
        )
        made_by = [*made_by[:keep], *[""] * len(prompt), *[response] * len(output)]
    return LineageArrays(tokens, logprobs, versions, made_by)


def faults(sample: SealedSample) -> Iterator[tuple[str, list[Row]]]:
    """What is wrong with a sample's arrays and sums, each with the model calls that show it."""
    lessons = _lessons(sample)
    for trace in sample.traces:
        yield from _alone(trace)
        if trace.even:
            yield from _against(trace, sample.calls, lessons)
    yield from _left_out(sample, lessons)
    yield from _sums(sample)


def _lessons(sample: SealedSample) -> frozenset[str]:
    """Response ids whose tokens may be learned from: trainable, cleared, of the sample's policy and not retried."""
    calls = [call for call in sample.calls if call is not None]
    retries = {call.body["supersedes"] for call in calls}
    return frozenset(
        call.body["response_id"]
        for call in calls
        if call.body["trainable"]
        and call["policy"] == sample.row["policy"]
        and call["governance"] is not None
        and call["governance"]["eligibility"] in TRAINABLE
        and call.body["response_id"] not in retries
    )


def _left_out(sample: SealedSample, lessons: frozenset[str]) -> Iterator[tuple[str, list[Row]]]:
    """Replies that could train and are neither in a lineage nor excluded with a reason."""
    replies = {response for trace in sample.traces for response in trace.calls}
    excuses = {entry.rpartition(":")[0] for entry in sample.row["excluded"]}
    if "*" in excuses:
        return
    for call in sample.calls:
        if call is None or not len(unpack(call.body["output_ids"])):
            continue
        response = call.body["response_id"]
        if response in lessons and response not in replies and response not in excuses:
            yield f"reply {response} is in no lineage, and nothing says why", [call]


def _alone(trace: SealedTrace) -> Iterator[tuple[str, list[Row]]]:
    """What the arrays say without the calls."""
    if not trace.even:
        sizes = (len(trace.tokens), len(trace.mask), len(trace.logprobs), len(trace.versions))
        yield f"lineage {trace.id} has arrays of lengths {sizes}", []
        return
    if not np.isfinite(trace.logprobs[trace.mask]).all():
        yield f"lineage {trace.id} has a log-probability that is no number where it trains", []
    if (trace.versions[trace.mask] < 0).any():
        yield f"lineage {trace.id} trains on a token without a version", []


def _against(
    trace: SealedTrace, calls: Sequence[Row | None], lessons: frozenset[str]
) -> Iterator[tuple[str, list[Row]]]:
    """What the calls say otherwise."""
    rows = [call for call in calls if call is not None and call.body["response_id"] in trace.calls]
    arrays = rebuild(trace, calls)
    if arrays.error:
        yield f"lineage {trace.id}: {arrays.error}", rows
        return
    if len(arrays.tokens) != len(trace.tokens):
        yield f"lineage {trace.id} has {len(trace.tokens)} tokens, its calls {len(arrays.tokens)}", rows
        return
    mask = np.array([response in lessons for response in arrays.made_by], bool)
    mask &= (arrays.versions >= 0) & np.isfinite(arrays.logprobs)
    trace_mask = trace.mask
    for name, differs in (
        ("token", arrays.tokens != trace.tokens),
        ("log-probability", trace_mask & (arrays.logprobs != trace.logprobs)),
        ("version", trace_mask & (arrays.versions != trace.versions)),
        ("mask", trace_mask != mask),
    ):
        at = _first(differs)
        if at is not None:
            yield f"lineage {trace.id} differs from its calls: the {name} at {at}", rows


def _sums(sample: SealedSample) -> Iterator[tuple[str, list[Row]]]:
    """What the trajectory says of its lineages."""
    row, versions = sample.row, sample.trained_versions
    length = sum(len(trace.tokens) for trace in sample.traces)
    if row["length"] != length:
        yield f"a trajectory says {row['length']} tokens, its lineages hold {length}", []
    if row["tokens"] != len(versions):
        yield f"a trajectory says {row['tokens']} trainable tokens, its lineages hold {len(versions)}", []
    if len(versions):
        span = (int(versions.min()), int(versions.max()))
        if (row["v_head"], row["v_tail"]) != span:
            yield (
                f"a trajectory says versions {row['v_head']} to {row['v_tail']}, its tokens {span[0]} to {span[1]}",
                [],
            )


def _first(differs: npt.NDArray[np.bool_]) -> int | None:
    """Index of the first difference."""
    return int(np.argmax(differs)) if differs.any() else None


CHAIN_FLAWS = frozenset({"step_gap", "chain_broken", "split_changed", "gap"})
"""refine's reasons that taint a whole attempt, whichever event carries them"""


class Tokens(Law):
    """A sample is what the model calls say: the same ids, log-probabilities and versions, and nothing else trains."""

    name = "tokens"
    sentence = "every lineage holds exactly the tokens, log-probabilities and versions of its model calls"
    unit = "tokens"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._gone = 0

    def trajectory(self, sample: SealedSample) -> None:
        row = sample.row
        self.finding.checked += sum(len(trace.tokens) for trace in sample.traces)
        for place, call in zip(sample.events, sample.calls, strict=True):
            if call is None and self.facts.is_gone("events", place):
                self._gone += 1
                return
            if call is None:
                self.fail("a trajectory names a model call that does not exist", row, place, **sample.ids)
                return
        for fault, calls in faults(sample):
            self.fail(fault, row, *calls, **sample.ids)

    def finish(self) -> None:
        if self._gone:
            self.note(f"{self._gone} trajectories cannot be compared: retention has taken their events")


class Staleness(Law):
    """Version v was trained from v-1. A trained token of version t is (v-1)-t versions old; hard policies bound that by
    the eta of the group's ticket, and the batch by the group's deadline."""

    name = "staleness"
    sentence = "every unmasked trained token is within eta of the version it was trained from"
    unit = "trained tokens"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._ages: Counter[int] = Counter()
        self._over = 0
        self._masked: dict[int, int] = {}
        self._stale: defaultdict[int, int] = defaultdict(int)
        self._marks: dict[int, Row] = {}
        self._unread: set[int] = set()

    def ledger(self, row: Row[LedgerEntry]) -> None:
        self._masked[row["version"]] = row["masked_tokens"]
        self._marks[row["version"]] = Row(row.raw, row.name, {"eta": row["eta"]}, b"")
        if any(group["lost"] for group in row["groups"]):
            self._unread.add(row["version"])

    def trajectory(self, sample: SealedSample) -> None:
        for group in self.facts.trained_in(sample.row.place):
            if group.loss is not None:
                continue
            release = str(self.facts.release.at(group.seq))
            base = group.version - 1
            eta = self._eta(group.ticket, group.version, release)
            versions = sample.trained_versions
            ages = base - versions
            self.finding.checked += len(versions)
            self._ages.update(ages.tolist())
            if len(versions) and int(ages.min()) < 0:
                message = f"version {group.version} trained on a token of version {int(versions.max())}, a later one"
                self.fail(message, group.ledger, sample.row, **sample.ids)
            if eta is None:
                continue
            over = int((ages > eta).sum())
            self._over += over
            if release == "mask-head":
                self._stale[group.version] += over
            elif over and release in HARD:
                message = (
                    f"version {group.version} was trained from {base} with {over} tokens of version "
                    f"{int(versions.min())}: {int(ages.max())} behind where eta is {eta}"
                )
                self.fail(message, group.ledger, sample.row, **sample.ids)
        self._deadline(sample)

    def _eta(self, ticket: int | None, version: int, release: str) -> int | None:
        """The bound of a group: its ticket's, or, where the learner masks, the one it masked by."""
        if release != "mask-head" and ticket is not None and (eta := self.facts.eta.at(ticket)) is not None:
            return int(eta)
        mark = self._marks.get(version)
        return mark["eta"] if mark else None

    def _deadline(self, sample: SealedSample) -> None:
        for group in self.facts.trained_in(sample.row.place):
            terms = self.facts.ready.get(group.seq)
            is_reserve = self.facts.release.at(group.seq) == "reserve"
            if terms and is_reserve and group.version - 1 > terms[1]:
                message = f"batch {group.version - 1} holds a group whose deadline was batch {terms[1]}"
                self.fail(message, group.ledger, sample.row, **sample.ids)

    def finish(self) -> None:
        """Under mask-head the learner says how many tokens it left out: exactly the stale ones."""
        for version, stale in sorted(self._stale.items()):
            if version not in self._unread and self._masked.get(version, 0) != stale:
                message = f"version {version} masked {self._masked.get(version, 0)} tokens where {stale} were stale"
                self.fail(message, self._marks[version], version=version)
        if self._ages:
            total = sum(self._ages.values())
            mean = sum(age * count for age, count in self._ages.items()) / total
            self.finding.facts |= {"oldest": max(self._ages), "mean": round(mean, 4), "over eta": self._over}
        if self.facts.release.at(0) == "soft":
            self.note("release policy soft: staleness is reported, not bounded")


class MinVersion(Law):
    """The bound rests on it: a group's tokens come from the version its grant asked for, or later."""

    name = "min-version"
    sentence = "no trainable token of a ready group is older than its grant's min_version"
    unit = "trained tokens"

    def trajectory(self, sample: SealedSample) -> None:
        for group in self.facts.trained_in(sample.row.place):
            terms = self.facts.ready.get(group.seq)
            versions = sample.trained_versions
            if terms is None or not len(versions):
                continue
            self.finding.checked += len(versions)
            if int(versions.min()) < terms[0]:
                message = f"a token of version {int(versions.min())} in a group that was granted from {terms[0]} on"
                self.fail(message, group.ledger, sample.row, **sample.ids)


class Eligible(Law):
    """Governance before learning: evaluation never trains, and no trainable token comes from content that was not
    cleared for its policy."""

    name = "eligible"
    sentence = "evaluation traffic and ineligible content never train"
    unit = "samples"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._trained: dict[str, Mark] = {}

    def ledger(self, row: Row[LedgerEntry]) -> None:
        for group in row["groups"]:
            for place in group["trajectories"]:
                if place["topic"].endswith(".evaluations"):  # of a branch, those of the policy that it comes from
                    message = f"version {row['version']} trained on an evaluation"
                    self.fail(message, row, version=row["version"], group=group["group"])

    def trajectory(self, sample: SealedSample) -> None:
        row = sample.row
        self.finding.checked += 1
        if row["split"] != "train":
            groups = self.facts.trained_in(row.place)
            verb = f"was trained in version {groups[0].version}" if groups else "lies among what may be trained"
            self.fail(f"a sample of split {row['split']} {verb}", row, *(t.ledger for t in groups[:1]), **sample.ids)
        traces = {trace.id: trace for trace in sample.traces}
        for call in sample.calls:
            why = _why_ineligible(call) if call is not None else None
            trace = traces.get(call.body["lineage"]) if call is not None and why else None
            if call is not None and trace is not None and trace.mask.any() and trace.even:
                reply = call.body["response_id"]
                arrays = rebuild(trace, sample.calls)
                positions = [at for at, response in enumerate(arrays.made_by) if response == reply]
                if len(arrays.tokens) == len(trace.tokens) and trace.mask[positions].any():
                    self.fail(f"tokens of reply {reply} train although it is {why}", row, call, **sample.ids)

        if row["tokens"] and self.facts.trained_in(row.place):
            self._trained[row["id"]] = row.mark

    def event(self, row: Row[Event]) -> None:
        """What taints an attempt taints all of it, from its start to its end."""
        mark = self._trained.get(row["root_trajectory"]) if row.name == "Event" else None
        if mark is None:
            return
        is_end = row["kind"] == "episode_ended" and row["trajectory"] == row["root_trajectory"]
        why = _flaw(row)
        if why is not None:
            message = f"a trained sample's {row['kind']} is {why}"
            self.fail(message, row, mark, trajectory=row["root_trajectory"], event=row["id"])
        if is_end or why is not None:
            del self._trained[row["root_trajectory"]]

    def evaluation(self, row: Row[Trajectory]) -> None:
        self.finding.checked += 1
        if row["split"] != "evaluation":
            self.fail(f"a sample of split {row['split']} lies among the evaluations", row, trajectory=row["id"])


def _flaw(event: Row[Event]) -> str | None:
    """Why an event's whole attempt must not train, None when it may."""
    governance = event["governance"]
    if governance is None:
        return "not governed"
    if event["kind"] == "gap" or governance["reason"] in CHAIN_FLAWS:
        return f"flagged ({governance['reason']})"
    if event["kind"] in ("episode_started", "episode_ended") and governance["eligibility"] in INELIGIBLE:
        return f"{governance['eligibility']} ({governance['reason']})"
    return None


def _why_ineligible(call: Row[Event]) -> str | None:
    """Why a model call must not train, None when it may."""
    governance = call["governance"]
    if governance is None:
        return "not governed"
    if governance["eligibility"] in INELIGIBLE:
        return f"{governance['eligibility']} ({governance['reason']})"
    if governance["redaction"] == "failed":
        return "withheld: its redaction failed"
    if not call.body["trainable"]:
        return f"untrainable ({call.body['untrainable_reason']})"
    return None
