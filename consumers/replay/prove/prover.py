"""Versions trained again from the log, one after the other, each compared with its record.

    plan -> { stretch of steps with the same ranks: form from a version's directory -> { samples -> train -> compare } }

Invariants: nothing is written to the log and no group is joined; all that is written lies under one private folder; a
step begins with the bytes of its recorded parent, from the directory that the learner wrote or from one that was proven
equal to it, or its result says nothing.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from millrace.consumers.learner.group import layouts
from millrace.consumers.learner.step.next_work import PlacedGroup
from millrace.consumers.learner.step.reading import read
from millrace.consumers.learner.version.collect import base_of
from millrace.consumers.replay.prove import cell_assignment, compare
from millrace.consumers.replay.prove.plan import Plan
from millrace.consumers.replay.prove.step_folder import Dump, Material, TrainedStep
from millrace.consumers.replay.prove.version_history import RecordedVersion, RecordedVersions, refusing_forgeries
from millrace.consumers.replay.prove.worker_pool import WorkerPool
from millrace.infra.config import Settings
from millrace.infra.errors import ProofError
from millrace.infra.log.history.places import PlaceReader
from millrace.trainers.weights import manifest

Word = Literal["equal", "close", "differs", "unknown"]
INT32_MAX = 2**31 - 1
"""stands for bounds that the ranks check, who know the model"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What training a version again gave. word: equal, bit for bit; close, within the tolerance of one step; differs;
    unknown, where the recorded bytes are not there to be compared with. asked: whether somebody asked for it, or it lay
    on the way; layout: the one that trained; relative: of the weights, where it was measured; detail: the first
    difference, in words."""

    version: int
    word: Word
    asked: bool
    layout: str
    seconds: float
    digest: str
    recorded: str
    relative: float | None = None
    detail: str = ""
    lost: int = 0
    unchanged: str | None = None


@dataclass(frozen=True, slots=True)
class LayoutVariant:
    """Another layout to compare over one step: its settings, and with how many ranks."""

    settings: Settings
    world: int


@dataclass(frozen=True, slots=True)
class RecordedBase:
    """A directory with the recorded bytes of a version."""

    path: Path
    digest: str


class Prover:
    """Proves the steps of a plan in `folder`, which is private and empty.

    settings: by version, those that train it; directories: of the versions whose files are there; exact: whether code,
    libraries and all the rest are those of the record, so that every bit must be; variant: a layout to compare over one
    step; dump: takes each step's exact tensors."""

    def __init__(
        self,
        versions: RecordedVersions,
        directories: Mapping[int, Path],
        reader: PlaceReader,
        pool: WorkerPool,
        folder: Path,
        settings: Callable[[RecordedVersion], Settings],
        *,
        exact: bool = True,
        variant: LayoutVariant | None = None,
        dump: Dump | None = None,
    ) -> None:
        self._recorded = versions
        self._directories = directories
        self._reader = reader
        self._pool = pool
        self._folder = folder
        self._settings = settings
        self._exact = exact
        self._variant = variant
        self._dump = dump
        self._root = folder / "versions"
        self._root.mkdir(mode=0o700)
        self._layout = ""
        self._group: tuple[object, ...] | None = None
        """which ranks form a group, and which version's bytes they have"""

    def run(self, plan: Plan) -> Iterator[Outcome]:
        """One outcome a step, in order. The next step begins with this one's bytes where they equal the record, else
        with the directory that was recorded; where neither is there, the run ends before the plan does. Raises
        ProofError where a step cannot be trained again."""
        base = self._recorded_base(plan.start)
        for number in plan.steps:
            version = self._recorded.versions[number]
            start_s = time.monotonic()
            material = self.material(version, self._settings(version))
            is_asked = number >= plan.first
            step, layout = self._step(version, material, base, self._dump if is_asked else None)
            outcome = self._judge(version, step, layout, is_asked=is_asked, start_s=start_s)
            next_base = self._base_of_next(version, outcome, step)
            yield outcome
            if self._variant is not None and outcome.asked and next_base is not None:
                yield self._in_other_layout(version, base, next_base, self._variant)
            if next_base is None:
                return
            self._forget(base, next_base)
            base = next_base

    # -- one step

    def material(self, version: RecordedVersion, settings: Settings, world: int | None = None) -> Material:
        """What the learner read for a version; with `world`, as that many cells of one rank read it. Raises ProofError
        where samples that it trained on cannot be read any more, or are others."""
        with refusing_forgeries(version.entry):
            return self._material(version, settings, world)

    def _material(self, version: RecordedVersion, settings: Settings, world: int | None) -> Material:
        entry, cells = version.entry, cell_assignment.cells_of(version.entry)
        if world is not None:
            cells = list(range(world))
        minibatches, by_seq = cell_assignment.manifest(
            entry, cells, self._recorded.tokens, self._recorded.shards, settings.learner.minibatches
        )
        losses = {group["seq"]: why for group in entry["groups"] if (why := group["lost"]) is not None}
        parts = [
            PlacedGroup(
                group["seq"],
                group["group"],
                [(place["topic"], place["partition"], place["offset"]) for place in group["trajectories"]],
            )
            for group in entry["groups"]
            if group["seq"] not in losses
        ]
        share = read(self._reader, parts, vocabulary=INT32_MAX, longest=INT32_MAX)
        if share.losses:
            raise ProofError(
                f"version {version.number} was trained on what cannot be read any more: {share.details[0]}. Restore "
                "it, or prove versions after it from one that is kept"
            )
        if world is None:
            cell_assignment.check(entry, by_seq, share.samples)
        oldest = self._recorded.oldest(version, settings.policy.release)
        with refusing_forgeries(entry):
            budget = int(entry["kernels"].get("tokens_per_pack", 0))
        return Material(version.number - 1, minibatches, by_seq, oldest, losses, share.samples, budget)

    def _step(
        self, version: RecordedVersion, material: Material, base: RecordedBase, dump: Dump | None
    ) -> tuple[TrainedStep, str]:
        settings, entry = self._settings(version), version.entry
        group = (entry["generation"], entry["leader"], version.world, entry["layout"], settings, base.digest)
        if self._group != group:
            self._layout, cells = self._pool.form(settings, version.world, base.path, base.digest)
            recorded_cells = cell_assignment.cells_of(entry)
            if cells != recorded_cells:
                raise ProofError(
                    f"version {version.number} was trained as {entry['layout']} with ranks in cells "
                    f"{recorded_cells}, and here they make {self._layout} with cells {cells}: the layout of "
                    "[learner] backend is another"
                )
        if dump is None:
            folder = self._fresh_folder("step")
            material.write(folder)
            step = self._pool.train(folder, self._root)
        else:
            folder = dump.begin(version, material, base.path)
            step = self._pool.train(folder, self._root, folder)
            dump.end(folder, step)
        self._group = (*group[:-1], step.digest)
        return step, self._layout

    def _judge(
        self, version: RecordedVersion, step: TrainedStep, layout: str, *, is_asked: bool, start_s: float
    ) -> Outcome:
        event = version.weights
        equal = step.digest == event["digest"]
        outcome = Outcome(
            version=version.number,
            word="equal" if equal else "differs",
            asked=is_asked,
            layout=layout,
            seconds=time.monotonic() - start_s,
            digest=step.digest,
            recorded=event["digest"],
            lost=sum(group["lost"] is not None for group in version.entry["groups"]),
            unchanged=step.unchanged,
        )
        if equal:
            return outcome
        assert step.path is not None, "rank 0 writes"
        detail = compare.first_file(event["files"], step.files)
        directory = self._directories.get(version.number)
        if directory is None:
            reason = "its recorded files are gone, so how far is not known"
            word: Word = "differs" if self._exact else "unknown"
            return replace(outcome, word=word, detail=f"{detail}; {reason}")
        far = compare.relative(directory, step.path)
        near = not self._exact and far <= compare.TOLERANCE
        return replace(
            outcome,
            word="close" if near else "differs",
            relative=far,
            detail=compare.first_tensor(directory, step.path) or detail,
        )

    def _base_of_next(self, version: RecordedVersion, outcome: Outcome, step: TrainedStep) -> RecordedBase | None:
        """Where the next step begins: recorded bytes, proven or kept."""
        if outcome.word == "equal":
            assert step.path is not None, "rank 0 writes"
            return RecordedBase(step.path, step.digest)
        if version.number in self._directories:
            return self._recorded_base(version.number)
        return None

    def _in_other_layout(
        self, version: RecordedVersion, base: RecordedBase, target: RecordedBase, variant: LayoutVariant
    ) -> Outcome:
        """The same step in another layout, from the same parent."""
        start_s = time.monotonic()
        layout, cells = self._pool.form(variant.settings, variant.world, base.path, base.digest)
        self._group = None
        material = self.material(version, variant.settings, max(cells) + 1)
        folder, root = self._fresh_folder("step"), self._fresh_folder("elsewhere")
        material.write(folder)
        step = self._pool.train(folder, root)
        assert step.path is not None, "rank 0 writes"
        far = compare.relative(target.path, step.path)
        return Outcome(
            version=version.number,
            word="equal" if step.digest == target.digest else "close" if far <= compare.TOLERANCE else "differs",
            asked=True,
            layout=layout,
            seconds=time.monotonic() - start_s,
            digest=step.digest,
            recorded=target.digest,
            relative=far,
        )

    # -- folders

    def _recorded_base(self, number: int) -> RecordedBase:
        """A version whose files are there, linked beside those that are trained, with the base of its adapter."""
        version = self._recorded.versions[number]
        digest = version.weights["digest"]
        path = self._directories[number]
        manifest.verify(path, digest)
        if beside := base_of(path):
            link_files(path.parent / beside, self._root)
        return RecordedBase(link_files(path, self._root), digest)

    def _forget(self, base: RecordedBase, after: RecordedBase) -> None:
        """Remove a version that nobody begins with any more; version 0 may be the base of an adapter."""
        if base.path != after.path and not base.path.name.startswith("v0-"):
            shutil.rmtree(base.path, ignore_errors=True)

    def _fresh_folder(self, name: str) -> Path:
        folder = self._folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        return folder


def link_files(directory: Path, root: Path) -> Path:
    """The same files under `root`, without a copy where the file system can; nobody writes to either."""
    target = root / directory.name
    if target.exists():
        return target
    target.mkdir(mode=0o700)
    for path in sorted(directory.iterdir()):
        if path.is_file():
            try:
                os.link(path, target / path.name)
            except OSError:
                shutil.copyfile(path, target / path.name)
    return target


def ranks(settings: Settings) -> int:
    """How many ranks the layout of [learner] backend has as it is written."""
    return sum(place.layout.world for place in layouts.role_places(settings.learner))
