"""`millrace replay prove`: choose versions, refuse what cannot be equal, train, print, answer with an exit code."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.context import BaseContext
from pathlib import Path

from rich.text import Text

from millrace.consumers import policy_names
from millrace.consumers.replay import compare, same_environment
from millrace.consumers.replay.dump import Dump, on_record
from millrace.consumers.replay.orders import TrainedStep
from millrace.consumers.replay.plan import Plan, asked, named, plan, spans
from millrace.consumers.replay.prove import OtherLayout, Outcome, Prover, linked, ranks
from millrace.consumers.replay.scratch_folder import scratch_folder
from millrace.consumers.replay.version_history import RecordedVersion, RecordedVersions
from millrace.consumers.replay.worker_pool import WorkerPool
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


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Of one call. versions: 12, 10..20 or all; recorded: the configuration comes from the ledger; anyway: what differs
    is no reason not to train; layout: another one to compare over one step; dump: where exact tensors go."""

    versions: str = "all"
    recorded: bool = False
    anyway: bool = False
    layout: str = ""
    dump: Path | None = None


@contextmanager
def proving(
    settings: Settings, bus: Bus, options: ReplayOptions, context: BaseContext | None = None
) -> Iterator[tuple[Plan, Iterator[Outcome]]]:
    """The plan, and the outcomes as they come. Raises ProofError before anything is trained where versions cannot be
    trained again, or differ in what decides their bytes."""
    recorded = RecordedVersions(History(bus, settings.namespace, settings.policy.name, claims(settings).resolve))
    kept = recorded.kept(policy_names.weights_root(settings))
    first, last = asked(options.versions, recorded.newest)
    _refuse_branch(recorded, settings.policy.name, range(first, last + 1))
    chosen = plan(first, last, recorded.newest, set(kept), recorded.gone())
    _refuse_branch(recorded, settings.policy.name, chosen.steps)
    settings_of = _settings_of(settings, recorded, options)
    exact = _refuse(recorded, chosen, settings_of, anyway=options.anyway)
    other = _other(settings, options.layout)
    size = max(*(recorded.versions[number].world for number in chosen.steps), other.world if other else 1, 1)
    reader = PlaceReader(bus, claims(settings))
    with (
        scratch_folder() as folder,
        WorkerPool(size, settings_of(recorded.versions[chosen.first]), context) as pool,
    ):
        prover = Prover(
            recorded,
            kept,
            reader,
            pool,
            folder,
            settings_of,
            exact=exact,
            other=other,
            dump=Dump(options.dump) if options.dump else None,
        )
        yield chosen, prover.run(chosen)


def _settings_of(
    settings: Settings, recorded: RecordedVersions, options: ReplayOptions
) -> Callable[[RecordedVersion], Settings]:
    """What trains a version: these settings, with the group size and shards that the policy began with."""
    first = recorded.first
    size = first["group_size"] or settings.policy.group_size
    shards = first["shards"] or settings.topics.shards
    base = settings.model_copy(
        update={
            "policy": settings.policy.model_copy(update={"group_size": size}),
            "topics": settings.topics.model_copy(update={"shards": shards}),
        }
    )
    made: dict[str, Settings] = {}

    def of(version: RecordedVersion) -> Settings:
        if not options.recorded:
            return base
        name = version.entry["config_hash"]
        if name not in made:
            made[name] = same_environment.recorded(base, version.entry)
        return made[name]

    return of


def _refuse_branch(recorded: RecordedVersions, policy: str, versions: range) -> None:
    """Raises ProofError for versions that no learner trained."""
    theirs = [number for number in versions if recorded.versions[number].weights["selection"] is not None]
    if theirs:
        were = "were" if len(theirs) > 1 else "was"
        raise ProofError(
            f"{named(theirs)} of {policy} {were} trained by `millrace replay branch` on a selection, "
            "not by learners: make the branch again under another name, with the command that made it, and "
            'compare digests (`millrace sql "SELECT policy, version, digest FROM versions"`)'
        )


def _refuse(
    recorded: RecordedVersions, chosen: Plan, settings_of: Callable[[RecordedVersion], Settings], *, anyway: bool
) -> bool:
    """Whether every bit can be expected. Raises ProofError where not, unless `anyway`."""
    known: dict[int, same_environment.Here] = {}
    found = []
    for number in chosen.steps:
        version = recorded.versions[number]
        settings = settings_of(version)
        if id(settings) not in known:
            known[id(settings)] = same_environment.here(settings)
        if differences := same_environment.differences(known[id(settings)], version.entry):
            found.append((number, differences))
    if found and not anyway:
        raise ProofError(same_environment.refusal(found))
    return not found


def _other(settings: Settings, layout: str) -> OtherLayout | None:
    if not layout:
        return None
    chosen = settings.model_copy(update={"learner": settings.learner.model_copy(update={"backend": layout})})
    if ":" not in layout:
        raise ConfigError(f"--layout {layout}: write it with its ranks, such as torch:d2")
    return OtherLayout(chosen, ranks(chosen))


# -- what is printed


def prove(settings: Settings, options: ReplayOptions, *, as_json: bool = False) -> int:
    """Prove versions of the configured policy. 0: all are equal, or as near as was asked for; 1: one is not."""
    console = Terminal()
    found: list[Outcome] = []
    with history(settings) as bus, proving(settings, bus, options) as (chosen, outcomes):
        if not as_json:
            _begin(console, settings, chosen)
        for outcome in outcomes:
            found.append(outcome)
            if not as_json:
                console.print(_row(outcome), highlight=False, soft_wrap=True)
    missing = sorted(set(range(chosen.first, chosen.last + 1)) - {one.version for one in found})
    good = not missing and all(one.word in ("equal", "close") for one in found)
    if as_json:
        rows = [asdict(outcome) for outcome in found]
        put_json({"start": chosen.start, "proven": good, "versions": rows, "untried": missing})
    else:
        console.print(_verdict(found, missing, good=good), highlight=False, soft_wrap=True)
    return 0 if good else 1


def _begin(console: Terminal, settings: Settings, chosen: Plan) -> None:
    way = f", training {spans(chosen.on_the_way)} on the way" if chosen.on_the_way else ""
    what = spans(range(chosen.first, chosen.last + 1))
    text = f"proving {what} of {settings.policy.name} from version {chosen.start}, which is kept{way}"
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


def _verdict(found: list[Outcome], missing: list[int], *, good: bool) -> Text:
    wrong = [outcome for outcome in found if outcome.word not in ("equal", "close")]
    seconds = sum(outcome.seconds for outcome in found)
    equal = len({outcome.version for outcome in found if outcome.word == "equal" and outcome.asked})
    if good:
        near = [outcome for outcome in found if outcome.word == "close"]
        more = f", {len(near)} within the tolerance of one step" if near else ""
        many = "1 version is" if equal == 1 else f"{equal} versions are"
        return Text(f"proven: {many} equal bit for bit{more} ({seconds:.1f} s)", "bold green")
    first = wrong[0]
    text = f"version {first.version} {first.word}: {first.detail}" if first.detail else f"version {first.version}"
    if missing:
        text += f". Not tried: {named(missing)}, since the recorded bytes that they begin with are gone"
    return Text(text, "bold red")


def train_dumped(settings: Settings, folder: Path, *, anyway: bool = False, as_json: bool = False) -> int:
    """Train a dumped step again. 0: bit for bit what is on record; 1: not."""
    with scratch_folder() as private:
        found = load(folder, settings, private, anyway=anyway)
    if as_json:
        put_json(_as_json(found))
    else:
        Terminal().print(_loaded(found), highlight=False, soft_wrap=True)
    return 0 if found.equal else 1


def _as_json(found: Loaded) -> dict[str, object]:
    return {
        "version": found.entry["version"],
        "equal": found.equal,
        "digest": found.trained.digest,
        "recorded": found.entry["digest"],
        "detail": found.detail,
        "differences": found.differences,
        "metrics": dict(found.trained.metrics),
        "recorded_metrics": dict(found.entry["metrics"]),
    }


def _loaded(found: Loaded) -> Text:
    version, recorded, now = found.entry["version"], found.entry["metrics"], found.trained.metrics
    text = Text(f"version {version} as {found.layout} in {found.seconds:.2f} s: ")
    text.append("equal bit for bit\n" if found.equal else f"differs: {found.detail}\n", COLOURS[_word(found)])
    for difference in found.differences:
        text.append(f"here {difference}\n", "yellow")
    for name in sorted({*recorded, *now}):
        if name in recorded and name in now and not name.startswith("timings_"):
            same_ = recorded[name] == now[name]
            text.append(f"  {name:<28} {now[name]:.9g}" + ("" if same_ else f"  recorded {recorded[name]:.9g}") + "\n")
    text.rstrip()
    return text


def _word(found: Loaded) -> str:
    return "equal" if found.equal else "differs"


@dataclass(frozen=True, slots=True)
class Loaded:
    """What training a dumped step gave. differences: by what this place differs from the one on record; detail: the
    first file that differs, empty where none does."""

    entry: LedgerEntry
    trained: TrainedStep
    layout: str
    seconds: float
    differences: list[str]
    detail: str

    @property
    def equal(self) -> bool:
        """Bit for bit what is on record."""
        return self.trained.digest == self.entry["digest"]


def load(
    folder: Path, settings: Settings, scratch: Path, *, anyway: bool = False, context: BaseContext | None = None
) -> Loaded:
    """Train the step in `folder`; what is written goes under `scratch`, an empty folder.

    The configuration is the recorded one, where the step says it. anyway: train where something else differs from the
    record. Raises ProofError for what is no step, or differs."""
    entry, files, start = on_record(folder)
    if entry["config"]:
        settings = same_environment.recorded(settings, entry)
    differences = same_environment.differences(same_environment.here(settings), entry)
    if differences and not anyway:
        raise ProofError(same_environment.refusal([(entry["version"], differences)]))
    root = scratch / "versions"
    root.mkdir(mode=0o700)
    for path in sorted(start.parent.iterdir()):
        linked(path, root)
    digest = manifest.load(root / start.name).digest
    world = len(entry["ranks"])
    start_s = time.monotonic()
    with WorkerPool(world, settings, context) as pool:
        formed = pool.form(settings, world, root / start.name, digest)
        trained = pool.train(folder, root)
    detail = "" if trained.digest == entry["digest"] else compare.first_file(files, trained.files)
    return Loaded(entry, trained, formed.layout, time.monotonic() - start_s, differences, detail)
