"""`millrace replay prove`: choose versions, refuse what cannot be equal, train, print, answer with an exit code."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.context import BaseContext
from pathlib import Path

from rich.text import Text

from millrace.consumers import policy_names
from millrace.consumers.replay.prove import compare, same_environment
from millrace.consumers.replay.prove.plan import Plan, number_range, plan, spans, version_text
from millrace.consumers.replay.prove.prover import LayoutVariant, Outcome, Prover, link_files, ranks
from millrace.consumers.replay.prove.step_folder import Dump, TrainedStep, on_record
from millrace.consumers.replay.prove.version_history import RecordedVersion, RecordedVersions
from millrace.consumers.replay.prove.worker_pool import WorkerPool
from millrace.infra.config import Settings
from millrace.infra.connect import claims, history
from millrace.infra.errors import ConfigError, ProofError
from millrace.infra.log.base import Bus
from millrace.infra.log.history.places import PlaceReader
from millrace.infra.log.history.reader import History
from millrace.infra.terminal import Terminal, put_json
from millrace.schemas.records import LedgerEntry
from millrace.trainers.weights import manifest

COLOURS = {"equal": "green", "close": "yellow", "differs": "bold red", "unknown": "yellow"}
SCRATCH_PREFIX = "millrace-replay-"


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Of one call. versions: 12, 10..20 or all; from_ledger: the configuration comes from there; anyway: what differs
    is no reason not to train; layout: another one to compare over one step; dump: where exact tensors go."""

    versions: str = "all"
    from_ledger: bool = False
    anyway: bool = False
    layout: str = ""
    dump: Path | None = None


@contextmanager
def proving(
    settings: Settings, bus: Bus, options: ReplayOptions, context: BaseContext | None = None
) -> Iterator[tuple[Plan, Iterator[Outcome]]]:
    """The plan, and the outcomes as they come. Raises ProofError before anything is trained where versions cannot be
    trained again, or differ in what decides their bytes."""
    versions = RecordedVersions(History(bus, settings.namespace, settings.policy.name, claims(settings).resolve))
    directories = versions.directories(policy_names.weights_root(settings))
    first, last = number_range(options.versions, versions.newest)
    _refuse_branch(versions, settings.policy.name, range(first, last + 1))
    route = plan(first, last, versions.newest, set(directories), versions.holes())
    _refuse_branch(versions, settings.policy.name, route.steps)
    settings_of = _settings_of(settings, versions, options)
    exact = _refuse(versions, route, settings_of, anyway=options.anyway)
    layout = _layout_variant(settings, options.layout)
    size = max(*(versions.versions[number].world for number in route.steps), layout.world if layout else 1, 1)
    reader = PlaceReader(bus, claims(settings))
    with (
        scratch_folder() as folder,
        WorkerPool(size, settings_of(versions.versions[route.first]), context) as pool,
    ):
        prover = Prover(
            versions,
            directories,
            reader,
            pool,
            folder,
            settings_of,
            exact=exact,
            variant=layout,
            dump=Dump(options.dump) if options.dump else None,
        )
        yield route, prover.run(route)


def _settings_of(
    settings: Settings, versions: RecordedVersions, options: ReplayOptions
) -> Callable[[RecordedVersion], Settings]:
    """What trains a version: these settings, with the group size and shards that the policy began with."""
    first = versions.first
    size = first["group_size"] or settings.policy.group_size
    shards = first["shards"] or settings.topics.shards
    base = settings.model_copy(
        update={
            "policy": settings.policy.model_copy(update={"group_size": size}),
            "topics": settings.topics.model_copy(update={"shards": shards}),
        }
    )
    by_hash: dict[str, Settings] = {}

    def of(version: RecordedVersion) -> Settings:
        if not options.from_ledger:
            return base
        name = version.entry["config_hash"]
        if name not in by_hash:
            by_hash[name] = same_environment.settings_of(base, version.entry)
        return by_hash[name]

    return of


def _refuse_branch(versions: RecordedVersions, policy: str, numbers: range) -> None:
    """Raises ProofError for versions that no learner trained."""
    branch_versions = [number for number in numbers if versions.versions[number].weights["selection"] is not None]
    if branch_versions:
        were = "were" if len(branch_versions) > 1 else "was"
        raise ProofError(
            f"{version_text(branch_versions)} of {policy} {were} trained by `millrace replay branch` on a selection, "
            "not by learners: make the branch again under another name, with the command that made it, and "
            'compare digests (`millrace sql "SELECT policy, version, digest FROM versions"`)'
        )


def _refuse(
    versions: RecordedVersions, route: Plan, settings_of: Callable[[RecordedVersion], Settings], *, anyway: bool
) -> bool:
    """Whether every bit can be expected. Raises ProofError where not, unless `anyway`."""
    places: dict[int, same_environment.TrainingPlace] = {}
    deviations = []
    for number in route.steps:
        version = versions.versions[number]
        settings = settings_of(version)
        if id(settings) not in places:
            places[id(settings)] = same_environment.training_place(settings)
        if differences := same_environment.differences(places[id(settings)], version.entry):
            deviations.append((number, differences))
    if deviations and not anyway:
        raise ProofError(same_environment.refusal(deviations))
    return not deviations


def _layout_variant(settings: Settings, layout: str) -> LayoutVariant | None:
    if not layout:
        return None
    variant_settings = settings.model_copy(update={"learner": settings.learner.model_copy(update={"backend": layout})})
    if ":" not in layout:
        raise ConfigError(f"--layout {layout}: write it with its ranks, such as torch:d2")
    return LayoutVariant(variant_settings, ranks(variant_settings))


# -- what is printed


def prove(settings: Settings, options: ReplayOptions, *, as_json: bool = False) -> int:
    """Prove versions of the configured policy. 0: all are equal, or as near as was asked for; 1: one is not."""
    console = Terminal()
    proofs: list[Outcome] = []
    with history(settings) as bus, proving(settings, bus, options) as (route, outcomes):
        if not as_json:
            _begin(console, settings, route)
        for outcome in outcomes:
            proofs.append(outcome)
            if not as_json:
                console.print(_row(outcome), highlight=False, soft_wrap=True)
    missing = sorted(set(range(route.first, route.last + 1)) - {one.version for one in proofs})
    is_proven = not missing and all(one.word in ("equal", "close") for one in proofs)
    if as_json:
        rows = [asdict(outcome) for outcome in proofs]
        put_json({"start": route.start, "proven": is_proven, "versions": rows, "untried": missing})
    else:
        console.print(_verdict(proofs, missing, is_proven=is_proven), highlight=False, soft_wrap=True)
    return 0 if is_proven else 1


def _begin(console: Terminal, settings: Settings, route: Plan) -> None:
    way = f", training {spans(route.on_the_way)} on the way" if route.on_the_way else ""
    numbers = spans(range(route.first, route.last + 1))
    text = f"proving {numbers} of {settings.policy.name} from version {route.start}, which is kept{way}"
    console.print(Text(text), highlight=False, soft_wrap=True)
    console.print(Text(f"{'version':>8}  {'result':<8} {'layout':<14} {'seconds':>7}  digest", style="dim"))


def _row(outcome: Outcome) -> Text:
    text = Text(f"{outcome.version:>8}  ")
    text.append(f"{outcome.word:<8}", COLOURS[outcome.word])
    text.append(f" {outcome.layout:<14} {outcome.seconds:>7.2f}  {outcome.digest[:12]}")
    notes = [] if outcome.asked else ["on the way"]
    if outcome.lost:
        notes.append(f"{outcome.lost} groups were lost")
    if outcome.unchanged:
        notes.append(f"unchanged: {outcome.unchanged}")
    if outcome.relative is not None:
        notes.append(f"relative difference {outcome.relative:.1e}")
    if outcome.detail:
        notes.append(outcome.detail)
    if outcome.word not in ("equal", "close"):
        notes.append(f"recorded {outcome.recorded[:12]}")
    text.append("".join(f"  {note}" for note in notes), "dim")
    return text


def _verdict(outcomes: list[Outcome], missing: list[int], *, is_proven: bool) -> Text:
    wrong = [outcome for outcome in outcomes if outcome.word not in ("equal", "close")]
    seconds = sum(outcome.seconds for outcome in outcomes)
    equal = len({outcome.version for outcome in outcomes if outcome.word == "equal" and outcome.asked})
    if is_proven:
        near = [outcome for outcome in outcomes if outcome.word == "close"]
        more = f", {len(near)} within the tolerance of one step" if near else ""
        many = "1 version is" if equal == 1 else f"{equal} versions are"
        return Text(f"proven: {many} equal bit for bit{more} ({seconds:.1f} s)", "bold green")
    first = wrong[0]
    text = f"version {first.version} {first.word}: {first.detail}" if first.detail else f"version {first.version}"
    if missing:
        text += f". Not tried: {version_text(missing)}, since the recorded bytes that they begin with are gone"
    return Text(text, "bold red")


def train_dump(settings: Settings, folder: Path, *, anyway: bool = False, as_json: bool = False) -> int:
    """Train a dumped step again. 0: bit for bit what is on record; 1: not."""
    with scratch_folder() as scratch:
        outcome = load(folder, settings, scratch, anyway=anyway)
    if as_json:
        put_json(_as_json(outcome))
    else:
        Terminal().print(_dump_text(outcome), highlight=False, soft_wrap=True)
    return 0 if outcome.equal else 1


def _as_json(outcome: DumpOutcome) -> dict[str, object]:
    return {
        "version": outcome.entry["version"],
        "equal": outcome.equal,
        "digest": outcome.step.digest,
        "recorded": outcome.entry["digest"],
        "detail": outcome.detail,
        "differences": outcome.differences,
        "metrics": dict(outcome.step.metrics),
        "recorded_metrics": dict(outcome.entry["metrics"]),
    }


def _dump_text(outcome: DumpOutcome) -> Text:
    version, record, now = outcome.entry["version"], outcome.entry["metrics"], outcome.step.metrics
    text = Text(f"version {version} as {outcome.layout} in {outcome.seconds:.2f} s: ")
    text.append("equal bit for bit\n" if outcome.equal else f"differs: {outcome.detail}\n", COLOURS[_word(outcome)])
    for difference in outcome.differences:
        text.append(f"here {difference}\n", "yellow")
    for name in sorted({*record, *now}):
        if name in record and name in now and not name.startswith("timings_"):
            same_ = record[name] == now[name]
            text.append(f"  {name:<28} {now[name]:.9g}" + ("" if same_ else f"  recorded {record[name]:.9g}") + "\n")
    text.rstrip()
    return text


def _word(outcome: DumpOutcome) -> str:
    return "equal" if outcome.equal else "differs"


@dataclass(frozen=True, slots=True)
class DumpOutcome:
    """What training a dumped step gave. differences: by what this place differs from the one on record; detail: the
    first file that differs, empty where none does."""

    entry: LedgerEntry
    step: TrainedStep
    layout: str
    seconds: float
    differences: list[str]
    detail: str

    @property
    def equal(self) -> bool:
        """Bit for bit what is on record."""
        return self.step.digest == self.entry["digest"]


def load(
    folder: Path, settings: Settings, scratch: Path, *, anyway: bool = False, context: BaseContext | None = None
) -> DumpOutcome:
    """Train the step in `folder`; what is written goes under `scratch`, an empty folder.

    The configuration is the recorded one, where the step says it. anyway: train where something else differs from the
    record. Raises ProofError for what is no step, or differs."""
    entry, files, start = on_record(folder)
    if entry["config"]:
        settings = same_environment.settings_of(settings, entry)
    differences = same_environment.differences(same_environment.training_place(settings), entry)
    if differences and not anyway:
        raise ProofError(same_environment.refusal([(entry["version"], differences)]))
    root = scratch / "versions"
    root.mkdir(mode=0o700)
    for path in sorted(start.parent.iterdir()):
        link_files(path, root)
    digest = manifest.load(root / start.name).digest
    world = len(entry["ranks"])
    start_s = time.monotonic()
    with WorkerPool(world, settings, context) as pool:
        layout, _ = pool.form(settings, world, root / start.name, digest)
        step = pool.train(folder, root)
    detail = "" if step.digest == entry["digest"] else compare.first_file(files, step.files)
    return DumpOutcome(entry, step, layout, time.monotonic() - start_s, differences, detail)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """An empty folder below the one for temporary files, removed at the end, as are those of replays that were
    killed. It is locked for as long as this process lives: one that can be locked is nobody's."""
    sweep(Path(tempfile.gettempdir()))
    folder, handle = _lock_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _lock_folder() -> tuple[Path, int]:
    """A new folder with its lock. Another process may sweep it away before it is locked: then another one."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX))
        with suppress(FileNotFoundError):
            handle = os.open(folder, os.O_RDONLY)
            fcntl.flock(handle, fcntl.LOCK_EX)
            if folder.exists():
                return folder, handle
            os.close(handle)


def sweep(root: Path) -> list[Path]:
    """Remove the folders under `root` that this user's replays left; gives them."""
    folders: list[Path] = []
    for path in root.glob(f"{SCRATCH_PREFIX}*"):
        with suppress(OSError):
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
                folders.append(path)
            finally:
                os.close(handle)
    return folders
