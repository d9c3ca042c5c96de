"""A branch, from the question to its last version.

    question -> candidates -> items -> guard -> version 0 (the parent's weights) -> batches -> versions 1, 2, ...

Invariants: no engine, no ticket and no consumer group is asked; nothing of the policy that it comes from is written;
all that decides is kept before version 0 is announced, so a branch that was killed goes on with the same items and ends
with the same bytes; a policy of that name is gone on with when it is this branch, and refused otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

import numpy as np

from millrace.consumers import clearance, policy_names, version_zero
from millrace.consumers.learner.step.next_work import PlacedGroup
from millrace.consumers.learner.step.reading import read as fetch
from millrace.consumers.replay.branch import guard, job, rewards, selection_file
from millrace.consumers.replay.branch.announce import Announcer
from millrace.consumers.replay.branch.items import BranchItem, BranchItems, singles
from millrace.consumers.replay.branch.job import BranchOptions
from millrace.consumers.replay.branch.records import BranchChoice
from millrace.consumers.replay.prove.version_history import directory_of
from millrace.consumers.replay.selection import ModelLimits, Question, Selector
from millrace.consumers.replay.text import Texts, Writer
from millrace.dialects.rendering.choose import choose
from millrace.infra import faults
from millrace.infra.config import Settings
from millrace.infra.errors import BranchError
from millrace.infra.log.base import Bus, Place
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.history import newest
from millrace.infra.log.history.newest import Head
from millrace.infra.log.history.places import PlaceReader
from millrace.infra.log.history.reader import History
from millrace.schemas.records import WeightVersion
from millrace.trainers.algorithms.base import Algorithm
from millrace.trainers.backends.base import Adam
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.batches.packing import cut, pack
from millrace.trainers.batches.sample import Sample
from millrace.trainers.learning import Trainer
from millrace.trainers.offline.loop import ABOUT, RunObserver, RunPace, train
from millrace.trainers.offline.order import ItemOrder
from millrace.trainers.schedule import Schedule
from millrace.trainers.tracking.base import Tracker
from millrace.trainers.weights import checkpoint
from millrace.trainers.weights.lora import merge
from millrace.trainers.weights.state import State

READ_AT_ONCE = 512
"""items whose samples are fetched together to be scored"""


class BranchObserver(RunObserver):
    """Follows the making of a branch; this one does nothing."""

    def on_selection(self, candidates: int, choice: BranchItems, left_out: Counter[str]) -> None:
        """What the question came to, before anything is trained."""

    def on_text(self, form: str, replies: int, unsaid: Counter[str]) -> None:
        """How many replies have no exact tokens and are written by the form of this renderer, and how many of the same
        trajectories are passed over, by reason. Not called where there is neither."""

    def on_reach(self, reach: guard.Reach) -> None:
        """How far the selection is from the starting weights."""

    def on_resume(self, version: int) -> None:
        """The branch exists already, and goes on from this version."""


@dataclass(frozen=True, slots=True)
class Parent:
    """The version that a branch begins at, and where its weights lie, under which digest: of a branch that goes on its
    own version 0 has them, once the parent's files are collected."""

    weights: WeightVersion
    directory: Path
    digest: str


class Brancher:
    """Makes branches of one policy. settings: of that policy; claims: what resolves large records; clock: the local
    time, which some models' forms write into text."""

    def __init__(
        self, settings: Settings, bus: Bus, claims: ClaimStore, clock: Callable[[], datetime] = datetime.now
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._claims = claims
        self._clock = clock
        self._history = History(bus, settings.namespace, settings.policy.name, claims.resolve)

    def run(
        self,
        options: BranchOptions,
        question: Question,
        *,
        observer: BranchObserver | None = None,
        trackers: Sequence[Tracker] = (),
    ) -> WeightVersion:
        """Make the branch, or go on with it; gives the event of its last version. Raises BranchError for what cannot be
        a branch, HistoryGone where a part of what is asked for is nowhere, TrainerError for what cannot be trained,
        FencedError when another process goes on with the same."""
        if options.name == self._settings.policy.name:
            raise BranchError(f"a branch of {options.name} needs a name of its own")
        target = options.settings(self._settings)
        with ExitStack() as lock:
            head = self._head(target)
            if head is None:
                lock.enter_context(selection_file.beginning(policy_names.weights_root(target)))
                head = self._head(target)  # whoever held it meanwhile may have begun it
            return self._make(options, question, observer or BranchObserver(), trackers, target, head, lock.close)

    def _make(
        self,
        options: BranchOptions,
        question: Question,
        observer: BranchObserver,
        trackers: Sequence[Tracker],
        target: Settings,
        head: Head | None,
        on_begin: Callable[[], None],
    ) -> WeightVersion:
        """`run`, once it is clear whether the branch goes on from `head` or begins. on_begin: called once it has."""
        parent = self._parent(options, target, head)
        algorithm, models = options.algorithm(), options.models(parent.directory)
        description = job.about(
            options,
            self._settings.policy.name,
            parent.weights["version"],
            parent.weights["digest"],
            job.contents(models),
        )
        backend = TorchBackend(
            Adam(weight_decay=options.weight_decay, clip=options.max_grad_norm), device=options.device
        )
        backend.form(0, 1, None, 60.0)
        try:
            begin = partial(_beginning, parent, options.seed)
            backend.load(begin())
            limits = ModelLimits(backend.vocabulary, backend.longest)
            as_of = self._clock() if head is None else selection_file.read(policy_names.weights_root(target)).as_of
            selector = self._selector(options, limits, self._writer(options, parent, limits, as_of))
            samples = partial(self._samples, selector, limits)
            if head is None:
                reward_set = rewards.choose(self._history, options.rewards) if options.rewards else None
                items = self._select(options, question, reward_set, selector, observer)
                if options.kind.ratios:
                    self._guard(options, backend, algorithm, items, samples, observer)
                self._begin(target, parent, begin(), items, reward_set, as_of)
            on_begin()
            selection = selection_file.read(policy_names.weights_root(target))
            items = selection.items
            if head is not None:
                self._check_clearance(items, selector)
                observer.on_resume(head.version)
            count = sum(len(item.places) for item in items)
            choice = BranchChoice(options.selection, selection.digest, count, selection.source, selection.rubric)
            if texts := sum(item.texts for item in items):
                choice = replace(choice, text_replies=texts, text_form=selector.form)
                description = {**description, "texts": texts, "form": selector.form}
            order = ItemOrder(len(items), options.batch, options.seed)
            pace = RunPace(
                options.steps or options.epochs * order.steps,
                save_every=options.save_every,
                keep=1 << 30,  # what may go is decided with the log, which the loop does not know
                dense=True,
            )
            total = 0 if options.decay == "constant" else pace.steps * algorithm.minibatches
            schedule = Schedule(options.lr, options.warmup, options.decay, total, options.floor)
            trainer = Trainer(backend, algorithm, schedule, budget=options.budget, held=job.loaders(models))
            identity = job.identity(options, target, {**description, "places": selection.digest})

            def batch(step: int, indices: Sequence[int]) -> list[Sample]:
                return samples([items[index] for index in indices])

            def items_of(step: int) -> list[BranchItem]:
                return [items[index] for index in order.items(step - 1)]

            with Announcer(target, self._bus, choice, identity, items_of, observer, options.keep) as announcer:
                announcer.check(choice)
                announcer.tidy()
                train(
                    trainer,
                    backend,
                    begin,
                    batch,
                    order,
                    pace,
                    policy_names.weights_root(target),
                    about=description,
                    resume=True,
                    trackers=trackers,
                    observer=announcer,
                    fault=_fault,
                )
                return announcer.head.weights
        finally:
            backend.tear_down()

    # -- where it begins

    def _parent(self, options: BranchOptions, target: Settings, branch: Head | None) -> Parent:
        """Where it begins: at the version that was asked for, else where it began, else at the newest. branch: what it
        came to so far. Raises BranchError for a policy of that name that is no branch of such a version."""
        names = policy_names.topics(self._settings)
        head = newest.head(self._bus, names["weights"], names["ledger"])
        name = self._settings.policy.name
        if head is None:
            raise BranchError(f"policy {name} does not exist: `millrace policy create --model DIR` writes version 0")
        version = options.version
        first = None if branch is None else self._first(target)
        if branch is not None and first is not None:
            began = first["parent_policy"], first["parent"]
            version = began[1] if version is None and began[0] == name else version
            if version is None or began != (name, version):
                origin = name if version is None else f"version {version} of {name}"
                where = f"of version {began[1]} of {began[0]}" if began[0] else "of nothing"
                raise BranchError(
                    f"policy {target.policy.name} exists already, at version {branch.version}, and is no branch of "
                    f"{origin}, but {where}: choose another name"
                )
        start: Head | None = head
        if version is not None and version != head.version:
            start = newest.older(self._bus, names["weights"], names["ledger"], version)
        if start is None:
            raise BranchError(f"{name} has no version {version}: it has 0 to {head.version}")
        event, root = start.weights, policy_names.weights_root(self._settings)
        lying = [(event, root), *([] if first is None else [(first, policy_names.weights_root(target))])]
        for weights, under in lying:
            if (directory := directory_of(weights, Path(under))) is not None:
                return Parent(event, directory, weights["digest"])
        raise BranchError(
            f"the files of version {event['version']} of {name} are gone from {root}: begin at one that is kept, "
            "such as 0; [learner] keep says how many stay"
        )

    def _first(self, target: Settings) -> WeightVersion | None:
        """Version 0 of a branch, which names its parent."""
        names = policy_names.topics(target)
        first = newest.older(self._bus, names["weights"], names["ledger"], 0)
        return None if first is None else first.weights

    def _head(self, target: Settings) -> Head | None:
        names = policy_names.topics(target)
        if not {names["weights"], names["ledger"]} <= {*self._bus.topics(f"{target.namespace}.")}:
            return None
        return newest.head(self._bus, names["weights"], names["ledger"])

    def _begin(
        self,
        target: Settings,
        parent: Parent,
        state: State,
        items: list[BranchItem],
        reward_set: rewards.ChosenRewards | None,
        as_of: datetime | None,
    ) -> None:
        """Keep what decides, then announce version 0."""
        root = policy_names.weights_root(target)
        selection_file.write(root, items, as_of, *((reward_set.source, reward_set.rubric) if reward_set else ()))
        (root / ABOUT).unlink(missing_ok=True)  # of a branch that was never announced
        faults.point("branch.kept")
        self._bus.ensure_topics(target.layout.specs())
        version_zero.begin(target, state, self._bus, (self._settings.policy.name, parent.weights["version"]))
        faults.point("branch.begun")

    # -- what it learns from

    def _writer(
        self, options: BranchOptions, parent: Parent, limits: ModelLimits, as_of: datetime | None
    ) -> Writer | None:
        """What writes text for the weights of the branch, as a gateway of theirs would at a moment."""
        if not options.kind.text:
            return None
        hashes = {name: parent.weights[name] for name in ("tokenizer_hash", "template_hash")}
        renderer = partial(choose, parent.directory, self._settings.gateway.renderer, **hashes, as_of=as_of)
        return Writer(renderer, limits.vocabulary, limits.longest)

    def _selector(self, options: BranchOptions, limits: ModelLimits, writer: Writer | None) -> Selector:
        rules = clearance.today(self._settings, options.name)
        tenant = self._settings.policy.tenant
        return Selector(self._history, rules, tenant, limits, writer, accept_gaps=options.accept_gaps)

    def _select(
        self,
        options: BranchOptions,
        question: Question,
        reward_set: rewards.ChosenRewards | None,
        selector: Selector,
        observer: BranchObserver,
    ) -> list[BranchItem]:
        selection = question(selector)
        candidates = (
            rewards.with_rewards(selection.candidates, reward_set.values) if reward_set else selection.candidates
        )
        has_no_rewards = reward_set is None and all(one.reward is None for one in candidates)
        choice = (singles if options.kind.text and has_no_rewards else options.kind.shape)(candidates)
        left_out = +(selection.left_out + choice.left_out)
        observer.on_selection(len(candidates), choice, left_out)
        if options.kind.text and has_no_rewards and candidates:
            observer.warn("nothing of it has a reward: all of it is imitated")
        for gap in selection.gaps:
            observer.warn(f"without {gap}")
        if not choice.items:
            why = "; ".join(f"{reason} ({count})" for reason, count in left_out.most_common(3))
            raise BranchError(f"nothing is left to learn from{': ' + why if why else ', the history is empty'}")
        texts = sum(item.texts for item in choice.items)
        if texts or selection.unsaid:
            observer.on_text(selector.form, texts, selection.unsaid)
        return choice.items

    def _check_clearance(self, items: Sequence[BranchItem], selector: Selector) -> None:
        """Raises BranchError where something of the selection may not be learned from any more, or is gone."""
        selection = selector.by_places(place for item in items for place in item.places)
        if losses := +selection.left_out:
            why = "; ".join(f"{reason} ({count})" for reason, count in losses.most_common(3))
            raise BranchError(f"the branch cannot go on with what it was selected from: {why}; make another branch")
        now = {one.place: one.digest for one in selection.candidates}
        for item in items:
            for place, digest in zip(item.places, item.digests, strict=False):
                _same_text(place, digest, now[place])

    def _samples(self, selector: Selector, limits: ModelLimits, items: Sequence[BranchItem]) -> list[Sample]:
        """The samples of some items, with the rewards chosen for them; seq is the place of an item among them."""
        owners = [(seq, item, at) for seq, item in enumerate(items) for at in range(len(item.places))]
        parts = [
            PlacedGroup(number, item.group, [_triple(item.places[at])]) for number, (_, item, at) in enumerate(owners)
        ]
        reader = PlaceReader(self._bus, self._claims)
        share = fetch(reader, parts, vocabulary=limits.vocabulary, longest=limits.longest)
        if share.losses:
            raise BranchError(f"{share.details[0]}; the branch cannot go on without it: make another branch")
        samples = [*share.samples, *_texts(selector, owners)]
        out = []
        for sample in sorted(samples, key=lambda sample: sample.seq):  # of one seq, exact ones first
            seq, item, at = owners[sample.seq]
            # A group of its own for each item: pairs come out of one group, and tenants may give theirs one name.
            out.append(replace(sample, seq=seq, group=f"{seq}/{item.group}", reward=item.rewards[at]))
        return out

    # -- before it trains

    def _guard(
        self,
        options: BranchOptions,
        backend: TorchBackend,
        algorithm: Algorithm,
        items: Sequence[BranchItem],
        samples: Callable[[Sequence[BranchItem]], list[Sample]],
        observer: BranchObserver,
    ) -> None:
        """Score the selection with the starting weights. Raises BranchError where too little of it counts."""
        differences: list[guard.Floats] = []
        for first in range(0, len(items), READ_AT_ONCE):
            for members in cut(samples(items[first : first + READ_AT_ONCE]), options.budget):
                micro = pack(members)
                scores = micro.split(backend.score([micro], algorithm.temperature)[0])
                for sample, logprobs in scores.items():
                    differences.append(np.asarray(logprobs, np.float64) - sample.logprobs[sample.mask != 0])
        found_reach = guard.reach(differences)
        observer.on_reach(found_reach)
        if not options.anyway:
            guard.refuse(found_reach)


def _beginning(parent: Parent, seed: int) -> State:
    """The parent's weights, with an optimizer that has not stepped yet."""
    state = merge(checkpoint.read(parent.directory, digest=parent.digest))
    return replace(state, moments={}, step=0, seed=seed, critic=None)


def _texts(selector: Selector, owners: Sequence[tuple[int, BranchItem, int]]) -> list[Sample]:
    """The samples of text of the items that have any; seq is the number of an owner."""
    numbers = [number for number, (_, item, _) in enumerate(owners) if item.texts]
    places = [owners[number][1].places[owners[number][2]] for number in numbers]
    out: list[Sample] = []
    replies: Counter[int] = Counter()
    for number, place, text in zip(numbers, places, selector.texts(places) if places else [], strict=True):
        if not isinstance(text, Texts):
            raise BranchError(f"{_spot(place)}: {text}; the branch cannot go on without it: make another branch")
        _, item, at = owners[number]
        if item.digests:
            _same_text(place, item.digests[at], text.digest)
        out += [replace(sample, seq=number) for sample in text.samples]
        replies[owners[number][0]] += text.replies
    for seq, item in {seq: item for seq, item, _ in owners if item.texts}.items():
        if replies[seq] != item.texts:
            raise BranchError(
                f"group {item.group}: of {item.texts} replies that were selected as text {replies[seq]} can be written "
                "now; make another branch"
            )
    return out


def _same_text(place: Place, digest: str, now: str) -> None:
    """Raises BranchError where text is written otherwise than when it was selected."""
    if digest != now:
        raise BranchError(
            f"the text of the trajectory at {_spot(place)} is written as other tokens now than when the branch began: "
            "its events, the form of the model or the code that renders it have changed; restore them, or make "
            "another branch"
        )


def _spot(place: Place) -> str:
    return f"{place.topic}[{place.partition}]@{place.offset}"


def _triple(place: Place) -> tuple[str, int, int]:
    return place.topic, place.partition, place.offset


def _fault(name: str) -> None:
    """The points of the loop, which knows no `infra`, under names that the list of points finds."""
    if name == "offline.after_step":
        faults.point("branch.after_step")
