"""The comment that a .sql file of this package begins with: what it is, in words, and a line for each name.

    -- What it is, in one sentence.
    --
    -- More about it, where there is more to say.
    --
    -- name: what it means
    --     and on

Invariant: a file without a sentence is refused, so that nothing is listed that nobody explains."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files

_ENTRY = re.compile(r"([a-z]\w*(?: [^:]+)?): (.+)")


@dataclass(frozen=True, slots=True)
class File:
    """One file: its name, its first sentence, what follows it, the meaning of each name, and the SQL behind."""

    name: str
    doc: str
    more: str
    names: dict[str, str]
    sql: str


def read(folder: str) -> dict[str, File]:
    """Every file of a folder of this package, by name, sorted."""
    place = files(__package__).joinpath(folder)
    names = sorted(file.name for file in place.iterdir() if file.name.endswith(".sql"))
    return {
        name.removesuffix(".sql"): parse(name.removesuffix(".sql"), place.joinpath(name).read_text("utf-8"))
        for name in names
    }


def parse(name: str, text: str) -> File:
    """The parts of a file. Raises ValueError for one that does not begin with a sentence."""
    lines = text.splitlines()
    end = next((number for number, line in enumerate(lines) if not line.startswith("--")), len(lines))
    words: list[str] = []
    names: dict[str, str] = {}
    last = ""
    for line in lines[:end]:
        comment = line.removeprefix("--")
        entry = _ENTRY.fullmatch(comment.strip())
        if comment.startswith("     ") and last:
            names[last] += f" {comment.strip()}"
        elif entry and words and not words[-1]:
            last = entry[1]
            names[last] = entry[2]
            words.append("")
        else:
            last = ""
            words.append(comment.strip())
    doc, *more = words or [""]
    if not doc.endswith("."):
        raise ValueError(f"{name}.sql must begin with a comment that says what it is in a sentence")
    return File(name, doc, " ".join(word for word in more if word), names, "\n".join(lines[end:]).strip())
