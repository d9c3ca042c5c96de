"""Each saved version of a branch becomes a version of its policy.

Invariants: the transactional id is opened before the newest version is read, so whoever trained the branch before is
fenced; a directory is durable before its transaction begins; what was saved and not announced never was, and is removed
before training goes on, so that the same step is trained again; versions are dense.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence

from millrace.consumers import policy_names
from millrace.consumers.learner.group.identity import Identity
from millrace.consumers.learner.step.leader import machine
from millrace.consumers.learner.version.collect import collect, serving_versions
from millrace.consumers.replay.branch.items import BranchItem
from millrace.consumers.replay.branch.records import BranchChoice, ledger_entry, version_metrics, weight_event
from millrace.infra import faults
from millrace.infra.config import Settings
from millrace.infra.errors import BranchError
from millrace.infra.log.base import Bus, Outgoing, Transactor
from millrace.infra.log.history import ledger, newest
from millrace.infra.log.history.newest import Head
from millrace.infra.log.history.reader import History
from millrace.infra.log.topics import full_name
from millrace.infra.versions import PIN, remove
from millrace.schemas import codec
from millrace.schemas.ids import now_micros
from millrace.trainers.offline.loop import RunObserver, versions
from millrace.trainers.weights import delta_files
from millrace.trainers.weights.checkpoint import Checkpoint


class Announcer(RunObserver):
    """Follows a training and announces each version that it saves. settings: of the branch; items_of: the items of a
    step, counted from 1; observer: follows the training too; keep: newest versions whose files are kept. Use as a
    context."""

    def __init__(
        self,
        settings: Settings,
        bus: Bus,
        choice: BranchChoice,
        identity: Identity,
        items_of: Callable[[int], Sequence[BranchItem]],
        observer: RunObserver,
        keep: int,
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._choice = choice
        self._identity = identity
        self._items_of = items_of
        self._observer = observer
        self._keep = keep
        self._topics = policy_names.topics(settings)
        self._root = policy_names.weights_root(settings)
        self._member = f"branch/{identity.tag}@{uuid.uuid4().hex}"
        self._transactor: Transactor = bus.transactor(policy_names.transactional_id(settings))
        faults.point("branch.fenced")
        head = newest.head(bus, self._topics["weights"], self._topics["ledger"])
        first = newest.older(bus, self._topics["weights"], self._topics["ledger"], 0)
        if head is None or first is None:
            raise BranchError(f"policy {settings.policy.name} has no version 0: run `millrace audit` on it")
        self.head: Head = head
        self._eta = first.weights["eta"] or 0
        self._steps: list[int] = []
        self._metrics: list[Mapping[str, float]] = []

    def tidy(self) -> None:
        """Remove directories that no announced version names, and versions beyond `keep`, which a process that died
        after it announced a version has left. Raises BranchError where the newest version is gone."""
        digests = self._digests()
        for number, path in versions(self._root):
            if number <= self.head.version and number not in digests:
                continue  # its records cannot be read, so nobody can tell
            if path.name != f"v{number}-{digests.get(number, '')[:12]}" and not remove(path):
                raise BranchError(
                    f"{path} was never announced, and it is pinned or cannot be renamed: move it out of {self._root}, "
                    f"or remove the file {PIN} in it"
                )
        if self.head.version not in dict(versions(self._root)):
            raise BranchError(
                f"version {self.head.version} of {self.head.weights['policy']} is not in {self._root}: restore "
                f"v{self.head.version}-{self.head.weights['digest'][:12]}, or make another branch"
            )
        self._collect()

    def check(self, choice: BranchChoice) -> None:
        """Raises BranchError where the versions so far were trained on another selection."""
        event = self.head.weights
        selection = event["selection"], event["selection_digest"], event["selection_places"]
        if self.head.version and (
            selection != (choice.text, choice.digest, choice.places)
            or (event["reward_source"], event["reward_rubric"]) != (choice.source, choice.rubric)
            or (event["text_replies"], event["text_form"]) != (choice.text_replies, choice.text_form)
        ):
            raise BranchError(
                f"version {self.head.version} of {event['policy']} was trained on another selection, other rewards "
                "or other text: go on with the options that it began with, or choose another name"
            )

    # -- a training

    def on_start(self, step: int, steps: int, items: int) -> None:
        self._observer.on_start(step, steps, items)

    def warn(self, text: str) -> None:
        self._observer.warn(text)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._steps.append(step)
        self._metrics.append(metrics)
        self._observer.on_step(step, metrics)

    def on_version(self, version: Checkpoint) -> None:
        faults.point("branch.saved")
        items = [item for step in self._steps for item in self._items_of(step)]
        size = delta_files.full_size(version.path)
        event = weight_event(self.head, version, self._choice, size, now_micros())
        entry = ledger_entry(
            self.head,
            event,
            items,
            version_metrics(self._metrics),
            self._member,
            self._identity,
            machine({}),
            self._eta,
        )
        self._transactor.begin()
        key = event["policy"].encode()
        self._transactor.send(Outgoing(self._topics["weights"], key, codec.encode("WeightVersion", event)))
        faults.point("branch.sent_weights")
        key = str(entry["version"]).encode()
        self._transactor.send(Outgoing(self._topics["ledger"], key, codec.encode("LedgerEntry", entry)))
        self._transactor.flush()
        faults.point("branch.before_commit")
        self._transactor.commit({}, None)
        faults.point("branch.committed")
        self.head = Head(event, entry)
        self._steps, self._metrics = [], []
        self._collect()
        self._observer.on_version(version)

    def _collect(self) -> None:
        workers = full_name(self._settings.namespace, "workers")
        serving = serving_versions(self._bus, workers, self._settings.policy.name, now_micros())
        collect(self._root, self._digests(), keep=self._keep, serving=serving)

    def _digests(self) -> dict[int, str]:
        """Digests of all versions up to the newest."""
        history = History(self._bus, self._settings.namespace, self._settings.policy.name, is_bounded=True)
        return {number: digest for number, digest in ledger.digests(history).items() if number <= self.head.version}

    def __enter__(self) -> Announcer:
        return self

    def __exit__(self, *_: object) -> None:
        self._transactor.close()
