"""A whole file, read and made into events before any of them is sent: how many, which rows cannot be, under which name.

Invariant: the name of an import is a digest of all that it will send, so the same rows in the same order under the same
terms have one sender at a time."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from millrace.formats.episodes.episode import Group
from millrace.formats.episodes.rows import BadRow
from millrace.formats.files import Refuse, RowReader, Watch, fingerprint, reader
from millrace.formats.imports.group_records import ImportTerms, Maker, content
from millrace.formats.layouts import OTHER_NAMES, READERS
from millrace.formats.layouts.base import ImportLayout
from millrace.infra.errors import ImportRefused
from millrace.infra.log.base import Outgoing
from millrace.infra.stages.letters import made_id

Make = Callable[[Group], list[Outgoing]]
"""the records of a group; raises BadRow"""


@dataclass(slots=True)
class FileCheck:
    """What a file comes to."""

    path: Path
    layout: type[ImportLayout]
    fingerprint: list[tuple[str, int, int]]
    """what the file was, so that it is known whether it is still that"""
    name: str = ""
    """who sends it"""
    groups: int = 0
    episodes: int = 0
    token_rows: int = 0
    """rows whose exact tokens are left out"""
    events: Counter[str] = field(default_factory=Counter)
    """by kind"""
    omissions: Counter[str] = field(default_factory=Counter)
    """parts of rows that were left out, by kind"""
    refusals: Counter[str] = field(default_factory=Counter)
    """rows, by code"""


def check(path: Path, layout: str, terms: ImportTerms, refuse: Refuse, watch: Watch) -> FileCheck:
    """Read a file. Raises ImportRefused where it cannot be read, or nothing says what it is."""
    source, marks = reader(path), fingerprint(path)
    result = FileCheck(path, layout_of(source, layout), marks)
    digest = hashlib.sha256()

    def note_refusal(number: int, error: BadRow) -> None:
        result.refusals[error.code] += 1
        refuse(number, error)

    reading = result.layout()
    for group, records in events(reading, source, Maker(terms).draft, note_refusal, watch):
        result.groups += 1
        result.episodes += len(group.episodes)
        result.token_rows += sum(1 for episode in group.episodes if episode.exact_tokens)
        digest.update(content(records))
        for record in records:
            result.events[record.headers["kind"].decode()] += 1
    result.omissions += reading.omissions
    result.name = f"import-{made_id('import', digest.hexdigest())}"
    return result


def events(
    layout: ImportLayout, source: RowReader, make: Make, refuse: Refuse, watch: Watch
) -> Iterator[tuple[Group, list[Outgoing]]]:
    """Every group of a file that can be imported, with its records, as `make` gives them."""
    for group in layout.groups(source, refuse, watch):
        try:
            yield group, make(group)
        except BadRow as error:
            refuse(group.row, error)


def layout_of(source: RowReader, name: str) -> type[ImportLayout]:
    """The layout that was asked for, else the one of the first row. Raises ImportRefused."""
    if name:
        named_layout = READERS.get(OTHER_NAMES.get(name, name))
        if named_layout is None:
            choices = ", ".join([*READERS, *OTHER_NAMES])
            raise ImportRefused(f"there is no layout {name!r}: choose one of {choices}")
        return named_layout
    first = next(source.rows(lambda number, error: None, lambda done, total: None), None)
    if first is None:
        raise ImportRefused(f"{source.path} has no row that can be read: each line should be one JSON object")
    for layout in READERS.values():
        if layout.fits(first.content):
            return layout
    keys = ", ".join(sorted(first.content)[:8])
    raise ImportRefused(
        f"nothing says which layout {source.path} has: row {first.number} has the keys {keys}. "
        f"Choose with --layout: {', '.join(READERS)}"
    )
