"""`millrace import`: read every file whole, say what cannot be imported, then send the rest.

Invariants: nothing is sent while a file has a row that is refused, unless rows are to be skipped; the same row is sent
under the same names every time, whatever stands beside it, so importing it again, in a file that has grown, or after a
kill, changes nothing and loses nothing; a group is sent in one transaction, so no reader sees a part of an episode,
whoever is killed when; one sender of an import is alive, another fences it; every row is counted as imported or as
refused, and each refused one is named with file and number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Self, cast, get_args

import orjson

from millrace.formats.episodes.rows import BadRow
from millrace.formats.files import fingerprint, reader
from millrace.formats.imports.check import FileCheck, check, events
from millrace.formats.imports.group_records import ImportTerms, Maker
from millrace.infra import faults
from millrace.infra.config import Settings
from millrace.infra.connect import connect_now
from millrace.infra.errors import FencedError, ImportRefused
from millrace.infra.log.base import Bus, Outgoing, Transactor
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.topics import NAME, full_name
from millrace.schemas.json_values import JsonObject
from millrace.schemas.records import Split

SPLITS: tuple[str, ...] = get_args(Split)
ON_ERROR = ("stop", "skip")
EXAMPLES = 5
"""refused rows that an error names"""

Report = Callable[[str, Path, int, int], None]
"""hears what is done (`checking`, `importing`), with which file, and how far of how much it is"""


def _ignore_report(verb: str, path: Path, position: int, total: int) -> None: ...


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """What a user says. layout: empty to tell from the rows; task: the task of every row, empty for their own; skip:
    import the rest where rows are refused; refusal_file: a file for their names."""

    layout: str = ""
    tenant: str = "local"
    split: Split = "train"
    task: str = ""
    skip: bool = False
    dry_run: bool = False
    refusal_file: Path | None = None


def from_flags(
    layout: str, tenant: str, split: str, task: str, on_error: str, refusal_file: Path | None, *, dry_run: bool
) -> ImportOptions:
    """The options that flags ask for. Raises ImportRefused for those that make no sense."""
    if split not in SPLITS:
        raise ImportRefused(f"there is no split {split!r}: choose one of {', '.join(SPLITS)}")
    if on_error not in ON_ERROR:
        raise ImportRefused(f"--on-error is {' or '.join(ON_ERROR)}, not {on_error!r}")
    return ImportOptions(layout, tenant, cast(Split, split), task, on_error == "skip", dry_run, refusal_file)


@dataclass(slots=True)
class ImportSummary:
    """What became of one file."""

    file: str
    layout: str
    name: str
    """of the import: the same for the same rows in the same order, under the same options"""
    groups: int
    trajectories: int
    events: dict[str, int]
    """by kind"""
    tokens_left_out: int
    """trajectories whose row had exact tokens, which nobody here saw sampled"""
    passed_over: dict[str, int]
    refused: dict[str, int]
    """rows, by reason"""
    examples: list[str] = field(default_factory=list)
    sent: bool = False
    """whether its events are in raw now"""

    def as_json(self) -> JsonObject:
        """For programs."""
        return asdict(self)


def import_files(
    settings: Settings,
    paths: Sequence[Path],
    options: ImportOptions,
    check_policy: Callable[[Settings, Bus], None],
    report: Report = _ignore_report,
) -> list[ImportSummary]:
    """Import files for the configured policy. `check_policy` raises where the deployment would take none of it. Raises
    ImportRefused for what cannot be imported, BusError for a log that does not answer or lacks a topic."""
    if options.dry_run:
        return import_into(None, settings.namespace, settings.policy.name, paths, options, report=report)
    with connect_now(settings) as bus:
        bus.check_topics(settings.layout.specs())
        check_policy(settings, bus)
        return import_into(
            bus,
            settings.namespace,
            settings.policy.name,
            paths,
            options,
            reward_key=settings.reward.key.get_secret_value(),
            claims=ClaimStore(settings.claims),
            report=report,
        )


def import_into(
    bus: Bus | None,
    namespace: str,
    policy: str,
    paths: Sequence[Path],
    options: ImportOptions,
    *,
    reward_key: str = "",
    claims: ClaimStore | None = None,
    report: Report = _ignore_report,
) -> list[ImportSummary]:
    """The same for any bus; without one everything is read and nothing sent."""
    if not NAME.fullmatch(options.tenant):
        raise ImportRefused(f"{options.tenant!r} is no name of a tenant: use letters, digits, '-' and '_'")
    terms = ImportTerms(full_name(namespace, "raw"), policy, options.tenant, options.split, options.task, reward_key)
    with _Refusals(options.refusal_file) as refusals:
        checks = [_check_file(path, options, terms, refusals, report) for path in paths]
    summaries = [_summary(one, refusals) for one in checks]
    if refusals.count and not options.skip and not options.dry_run:
        raise ImportRefused(refusals.summary())
    if bus is None or options.dry_run:
        return summaries
    faults.point("import.checked")
    maker = Maker(terms)  # for all files: equal rows are as many, whichever of them they lie in
    for one, summary in zip(checks, summaries, strict=True):
        _send(bus, namespace, one, maker, claims, report)
        summary.sent = True
    return summaries


def _check_file(
    path: Path, options: ImportOptions, terms: ImportTerms, refusals: _Refusals, report: Report
) -> FileCheck:
    return check(
        path,
        options.layout,
        terms,
        lambda number, error: refusals.add(path, number, error),
        lambda done, total: report("checking", path, done, total),
    )


def _send(bus: Bus, namespace: str, one: FileCheck, maker: Maker, claims: ClaimStore | None, report: Report) -> None:
    layout = one.layout()

    def watch(position: int, total: int) -> None:
        report("importing", one.path, position, total)

    def groups() -> Iterator[list[Outgoing]]:
        for _, records in events(layout, reader(one.path), maker.group, _said_already, watch):
            yield records

    if fingerprint(one.path) != one.fingerprint:
        raise ImportRefused(f"{one.path} was written to after it was read, so nothing of it was imported: try again")
    try:
        send(bus, full_name(namespace, one.name), groups(), claims)
    except FencedError:
        raise ImportRefused(f"the rows of {one.path} are being imported by another process, which goes on") from None
    if fingerprint(one.path) != one.fingerprint:
        raise ImportRefused(
            f"{one.path} was written to while it was imported, so what came of it may be neither the old file nor the "
            "new one: import files that nobody writes to any more"
        )


def _summary(one: FileCheck, refusals: _Refusals) -> ImportSummary:
    return ImportSummary(
        str(one.path),
        one.layout.name,
        one.name,
        one.groups,
        one.episodes,
        dict(one.events),
        one.token_rows,
        dict(one.omissions),
        dict(one.refusals),
        refusals.of(one.path),
    )


def _said_already(number: int, error: BadRow) -> None:
    """A row that was refused when its file was checked."""


class _Refusals:
    """Rows that cannot be imported: all of them counted and, where there is a file for them, a line each there."""

    def __init__(self, out: Path | None) -> None:
        self.count = 0
        self._first: dict[Path, list[str]] = {}
        self._file: IO[bytes] | None = None
        if out is not None:
            try:
                self._file = out.open("xb")
            except FileExistsError:
                raise ImportRefused(f"{out} is there already: remove it, or choose another name") from None
            except FileNotFoundError:
                raise ImportRefused(f"there is no folder {out.parent}: make it, or choose another name") from None
            out.chmod(0o600)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, path: Path, number: int, error: BadRow) -> None:
        self.count += 1
        first = self._first.setdefault(path, [])
        if len(first) < EXAMPLES:
            first.append(f"{path}:{number}: {error.code}: {error}")
        if self._file is not None:
            line = {"file": str(path), "row": number, "reason": error.code, "detail": str(error)}
            self._file.write(orjson.dumps(line) + b"\n")

    def of(self, path: Path) -> list[str]:
        """The first of a file, in words."""
        return self._first.get(path, [])

    def summary(self) -> str:
        """What an error says of them."""
        lines = [line for first in self._first.values() for line in first][:EXAMPLES]
        if self.count > len(lines):
            lines.append(f"and {self.count - len(lines):,} more")
        rows = "1 row" if self.count == 1 else f"{self.count:,} rows"
        examples = "".join(f"  {line}\n" for line in lines)
        return (
            f"{rows} cannot be imported, so nothing was:\n{examples}"
            "Mend them, or leave them out with --on-error skip; --refused FILE lists all of them"
        )


RECORDS, SIZE = 512, 4 << 20
"""records and bytes from which on a transaction is committed"""


def send(bus: Bus, owner: str, groups: Iterable[list[Outgoing]], claims: ClaimStore | None) -> None:
    """Write groups. `owner`: the transactional id. Raises FencedError when the same rows are imported elsewhere,
    BusError when the log does not answer: then importing them again goes on."""
    with bus.transactor(owner) as transactor:
        waiting: list[Outgoing] = []
        size = 0
        for group in groups:
            waiting += group
            size += sum(len(one.value or b"") for one in group)
            if len(waiting) >= RECORDS or size >= SIZE:
                _commit(transactor, waiting, claims)
                waiting, size = [], 0
        if waiting:
            _commit(transactor, waiting, claims)


def _commit(transactor: Transactor, waiting: Iterable[Outgoing], claims: ClaimStore | None) -> None:
    fitting = [_fitting(out, claims) for out in waiting]  # a storage takes its time, and a transaction has little
    transactor.begin()
    for out in fitting:
        transactor.send(out, wants_place=False)
        faults.point("import.sent")
    faults.point("import.written")
    transactor.commit({}, None)
    faults.point("import.committed")


def _fitting(out: Outgoing, claims: ClaimStore | None) -> Outgoing:
    return replace(out, value=claims.fitting("Event", out.value or b"")) if claims else out
