"""Laws about what was trained on: exact tokens, their versions within bounds, and only what may be learned from."""

from __future__ import annotations

from collections import Counter, defaultdict

from millrace.consumers.audit.facts import HARD, Facts
from millrace.consumers.audit.law import Law
from millrace.consumers.audit.lineages import faults, rebuild
from millrace.consumers.audit.rows import Mark, Row, SealedSample
from millrace.schemas.records import Event, LedgerEntry, Trajectory

BARRED = frozenset({"denied", "audit_only"})
"""eligibilities that never train"""
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
            if call is None and self.facts.gone("events", place):
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
        for trained in self.facts.trained_in(sample.row.place):
            if trained.lost is not None:
                continue
            release = str(self.facts.release.at(trained.seq))
            base = trained.version - 1
            eta = self._eta(trained.ticket, trained.version, release)
            versions = sample.trained_versions
            ages = base - versions
            self.finding.checked += len(versions)
            self._ages.update(ages.tolist())
            if len(versions) and int(ages.min()) < 0:
                message = f"version {trained.version} trained on a token of version {int(versions.max())}, a later one"
                self.fail(message, trained.ledger, sample.row, **sample.ids)
            if eta is None:
                continue
            over = int((ages > eta).sum())
            self._over += over
            if release == "mask-head":
                self._stale[trained.version] += over
            elif over and release in HARD:
                message = (
                    f"version {trained.version} was trained from {base} with {over} tokens of version "
                    f"{int(versions.min())}: {int(ages.max())} behind where eta is {eta}"
                )
                self.fail(message, trained.ledger, sample.row, **sample.ids)
        self._deadline(sample)

    def _eta(self, ticket: int | None, version: int, release: str) -> int | None:
        """The bound of a group: its ticket's, or, where the learner masks, the one it masked by."""
        if release != "mask-head" and ticket is not None and (eta := self.facts.eta.at(ticket)) is not None:
            return int(eta)
        mark = self._marks.get(version)
        return mark["eta"] if mark else None

    def _deadline(self, sample: SealedSample) -> None:
        for trained in self.facts.trained_in(sample.row.place):
            terms = self.facts.ready.get(trained.seq)
            reserved = self.facts.release.at(trained.seq) == "reserve"
            if terms and reserved and trained.version - 1 > terms[1]:
                message = f"batch {trained.version - 1} holds a group whose deadline was batch {terms[1]}"
                self.fail(message, trained.ledger, sample.row, **sample.ids)

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
        for trained in self.facts.trained_in(sample.row.place):
            terms = self.facts.ready.get(trained.seq)
            versions = sample.trained_versions
            if terms is None or not len(versions):
                continue
            self.finding.checked += len(versions)
            if int(versions.min()) < terms[0]:
                message = f"a token of version {int(versions.min())} in a group that was granted from {terms[0]} on"
                self.fail(message, trained.ledger, sample.row, **sample.ids)


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
            trained = self.facts.trained_in(row.place)
            verb = f"was trained in version {trained[0].version}" if trained else "lies among what may be trained"
            self.fail(f"a sample of split {row['split']} {verb}", row, *(t.ledger for t in trained[:1]), **sample.ids)
        traces = {trace.id: trace for trace in sample.traces}
        for call in sample.calls:
            why = _barred(call) if call is not None else None
            trace = traces.get(call.body["lineage"]) if call is not None and why else None
            if call is not None and trace is not None and trace.mask.any() and trace.even:
                reply = call.body["response_id"]
                built = rebuild(trace, sample.calls)
                own = [at for at, made in enumerate(built.made_by) if made == reply]
                if len(built.tokens) == len(trace.tokens) and trace.mask[own].any():
                    self.fail(f"tokens of reply {reply} train although it is {why}", row, call, **sample.ids)

        if row["tokens"] and self.facts.trained_in(row.place):
            self._trained[row["id"]] = row.mark

    def event(self, row: Row[Event]) -> None:
        """What taints an attempt taints all of it, from its start to its end."""
        mark = self._trained.get(row["root_trajectory"]) if row.name == "Event" else None
        if mark is None:
            return
        ended = row["kind"] == "episode_ended" and row["trajectory"] == row["root_trajectory"]
        why = _flaw(row)
        if why is not None:
            message = f"a trained sample's {row['kind']} is {why}"
            self.fail(message, row, mark, trajectory=row["root_trajectory"], event=row["id"])
        if ended or why is not None:
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
    if event["kind"] in ("episode_started", "episode_ended") and governance["eligibility"] in BARRED:
        return f"{governance['eligibility']} ({governance['reason']})"
    return None


def _barred(call: Row[Event]) -> str | None:
    """Why a model call must not train, None when it may."""
    governance = call["governance"]
    if governance is None:
        return "not governed"
    if governance["eligibility"] in BARRED:
        return f"{governance['eligibility']} ({governance['reason']})"
    if governance["redaction"] == "failed":
        return "withheld: its redaction failed"
    if not call.body["trainable"]:
        return f"untrainable ({call.body['untrainable_reason']})"
    return None
