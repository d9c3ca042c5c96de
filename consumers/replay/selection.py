"""From a question about trajectories to candidates: a rule over each, or a list of places.

Invariants: what may not be learned from is left out before anybody's rule is asked; every trajectory that is looked at
is a candidate or is counted once under the reason that left it out; evaluation traffic never trains, nor does content
of a tenant whose rules of today deny it for the policy that is the source or for the branch, nor a sample of which a
model call was denied, kept for audit only or withheld with tokens in it, or cannot be read any more, so that nothing
tells what was decided about it; text is learned from only where a writer of text is given, and only as that of calls
that are cleared; candidates keep the order of the list, or of the log; no more than a chunk of samples is held at a
time; a rule over a history that has lost its beginning is refused, since retention would narrow the selection in
silence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from millrace.consumers.replay.text import Texts, Writer
from millrace.dialects.dialogue import Unsayable
from millrace.formats.clearance import TenantRules, usable_calls
from millrace.infra.log.base import Place
from millrace.infra.log.history.gaps import check_whole
from millrace.infra.log.history.kinds import EVALUATIONS, EVENTS, TRAJECTORIES, Kind
from millrace.infra.log.history.reader import History
from millrace.infra.log.history.rows import Row
from millrace.schemas.errors import SchemaError
from millrace.schemas.records import Event, Trajectory
from millrace.trainers.batches.sample import check, samples_of
from millrace.trainers.errors import BadSample

CHUNK = 256
"""trajectories whose model calls are fetched at once"""

EVALUATION = "evaluation traffic"
TENANT = "the rules of its tenant do not let it train"
CALLS = "a model call in it may not train"
NO_CALLS = "its model calls cannot be read any more, so nothing says whether it may train"
UNREADABLE = "no trajectory that can be read lies there (any more)"
ELSEWHERE = "the place is in another topic than the policy's trajectories"
TWICE = "named twice"
NO_MATCH = "not asked for"
INEXACT = "it has no exact tokens that can train"
UNFIT = "the model cannot take it: it is too long, or has tokens outside the vocabulary"

Rule = Callable[[Trajectory], bool]


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a model takes: token ids below vocabulary, at most `longest` tokens a sample."""

    vocabulary: int
    longest: int


@dataclass(frozen=True, slots=True)
class BranchCandidate:
    """A trajectory that may be learned from. tokens: of all its lineages and texts; reward: as it was sealed, until
    another is chosen; texts: its replies that are learned from as text; digest: the digest of what these are written
    as, empty where there are none."""

    place: Place
    id: str
    attempt: str
    tenant: str
    group: str
    sample: int
    tokens: int
    reward: float | None
    texts: int = 0
    digest: str = ""


@dataclass(slots=True)
class SelectionResult:
    """What a question came to. left_out: how many, by reason; unsaid: replies of candidates that are passed over, by
    reason; gaps: ranges that nobody has any more, so that nothing of them could be looked at."""

    candidates: list[BranchCandidate] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    unsaid: Counter[str] = field(default_factory=Counter)
    gaps: list[str] = field(default_factory=list)


Question = Callable[["Selector"], SelectionResult]
"""asks for candidates by a rule, by places or by SQL"""


class Selector:
    """Looks at the trajectories of one policy. owner: the tenant that it belongs to; rules: those of today;
    limits: of the model that shall learn, None where none does; writer: of text, None where only exact tokens count;
    accept_gaps: a rule takes that of a history that has lost a part."""

    def __init__(
        self,
        history: History,
        rules: TenantRules,
        owner: str,
        limits: ModelLimits | None,
        writer: Writer | None = None,
        *,
        accept_gaps: bool = False,
    ) -> None:
        self._history = history
        self._allowed = rules
        self._owner = owner
        self._limits = limits
        self._writer = writer
        self._accept_gaps = accept_gaps

    @property
    def form(self) -> str:
        """Of the renderer that writes text; empty where none does."""
        return "" if self._writer is None else self._writer.name

    def by_rule(self, rule: Rule) -> SelectionResult:
        """All that a rule wants. Raises UnreachableError, HistoryGone where a part of it is nowhere."""
        selection = SelectionResult(gaps=check_whole(self._history, TRAJECTORIES, accepts_gaps=self._accept_gaps))
        self._judge(self._history.rows(TRAJECTORIES), rule, selection)
        for partition in self._history.partitions(EVALUATIONS):
            selection.left_out[EVALUATION] += sum(1 for _ in self._history.records(EVALUATIONS, partition))
        return selection

    def by_places(self, places: Iterable[Place], rule: Rule = lambda _: True) -> SelectionResult:
        """Those at the places of a list, such as SQL gives, that a rule wants too. Raises UnreachableError."""
        selection, unique = SelectionResult(), list(dict.fromkeys(source := list(places)))
        selection.left_out[TWICE] += len(source) - len(unique)
        trajectories, evaluations = (self._history.names[kind] for kind in (TRAJECTORIES, EVALUATIONS))
        selection.left_out[EVALUATION] += sum(place.topic == evaluations for place in unique)
        selection.left_out[ELSEWHERE] += sum(place.topic not in (trajectories, evaluations) for place in unique)
        self._judge(
            self._fetch_rows([place for place in unique if place.topic == trajectories], selection), rule, selection
        )
        return selection

    def texts(self, places: Sequence[Place]) -> list[Texts | str]:
        """The text of the trajectories at some places, cleared anew, or why a place has none (any more)."""
        texts: list[Texts | str] = []
        rows = self._history.fetch(TRAJECTORIES, places)
        calls = iter(self._calls([place for row in rows if row is not None for place in row.places("events")]))
        for row in rows:
            if row is None:
                texts.append(UNREADABLE)
                continue
            events = [next(calls) for _ in row["events"]]
            why = problem(row.record, events, self._allowed, self._owner)
            texts.append(self._texts(row.record, events) if why is None else why)
        return texts

    def _texts(self, record: Trajectory, calls: Sequence[Row[Event] | None]) -> Texts:
        """Of a trajectory without a problem."""
        there = usable_calls([call for call in calls if call is not None], self._owner)
        return Texts() if self._writer is None else self._writer.texts(record, there)

    def _fetch_rows(self, places: Sequence[Place], selection: SelectionResult) -> Iterator[Row[Trajectory]]:
        for first in range(0, len(places), CHUNK):
            for row in self._history.fetch(TRAJECTORIES, places[first : first + CHUNK]):
                if row is None:
                    selection.left_out[UNREADABLE] += 1
                else:
                    yield row

    def _judge(self, rows: Iterable[Row[Trajectory]], rule: Rule, selection: SelectionResult) -> None:
        source = iter(rows)
        while chunk := list(islice(source, CHUNK)):
            calls = iter(self._calls([place for row in chunk for place in row.places("events")]))
            for row in chunk:
                events = [next(calls) for _ in row["events"]]
                match self._looked_at(row, events, rule):
                    case str() as reason:
                        selection.left_out[reason] += 1
                    case candidate, unsaid:
                        selection.candidates.append(candidate)
                        selection.unsaid += unsaid

    def _calls(self, places: Sequence[Place]) -> list[Row[Event] | None]:
        kind: Kind[Event] = EVENTS
        return self._history.fetch(kind, places) if places else []

    def _looked_at(
        self, row: Row[Trajectory], calls: Sequence[Row[Event] | None], rule: Rule
    ) -> tuple[BranchCandidate, Counter[str]] | str:
        """A candidate and its replies that are passed over, or why it is none."""
        record = row.record
        reason = problem(record, calls, self._allowed, self._owner)
        if reason is not None:
            return reason
        if not rule(record):
            return NO_MATCH
        if self._limits is None:
            return _candidate(row, Texts()), Counter()
        texts = self._texts(record, calls)
        exact = _unlearnable(record, self._limits)
        if exact == INEXACT and texts.samples and not record["lineages"]:
            exact = None
        if exact == INEXACT and texts.refusals:
            return f"{INEXACT}, and of its text {texts.refusals.most_common(1)[0][0]}"
        return exact or (_candidate(row, texts), texts.refusals)


def problem(sample: Trajectory, calls: Sequence[Row[Event] | None], rules: TenantRules, owner: str) -> str | None:
    """Why a sample may not be learned from; None where it may. calls: of its `events`, None where one cannot be read;
    allowed: the rules of today; owner: the tenant of the policy."""
    if sample["split"] != "train":
        return EVALUATION
    if rules(sample["tenant"], sample["split"]) is not None:
        return TENANT
    there = [call for call in calls if call is not None]
    try:
        usable_calls(there, owner)
    except Unsayable:
        return CALLS
    except SchemaError:
        return NO_CALLS
    return None if len(there) == len(calls) else NO_CALLS


def _unlearnable(record: Trajectory, limits: ModelLimits) -> str | None:
    """Why no step can learn from its tokens."""
    try:
        samples = samples_of(record, 0)
    except (BadSample, ArithmeticError, LookupError, TypeError, ValueError):
        return INEXACT
    if not any(sample.trainable for sample in samples):
        return INEXACT
    try:
        check(samples, vocabulary=limits.vocabulary, longest=limits.longest)
    except BadSample:
        return UNFIT
    return None


def _candidate(row: Row[Trajectory], texts: Texts) -> BranchCandidate:
    place, record = row.place, row.record
    key = record["id"], record["attempt"], record["tenant"], record["group"], record["sample"]
    tokens = record["length"] + sum(sample.length for sample in texts.samples)
    return BranchCandidate(place, *key, tokens, record["reward"], texts.replies, texts.digest)
