"""The rooms of the product, and their figures: `python -m tests.support.house` prints them beside the budget, as `make
check` does.

A floor is the longest chain of imports below a file inside its own room. A name counts as unplain where its last word
is a participle, an adjective or a pronoun and it asks no question (`is_`, `has_`)."""

from __future__ import annotations

import ast
import io
import re
import statistics
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
ROOMS = tuple(sorted(path.parent.name for path in ROOT.glob("*/__init__.py")))
BUDGET = {
    "schemas": 4000, "infra": 16000, "dialects": 8700, "producers": 20000, "formats": 3700, "streams": 7000,
    "trainers": 13700, "consumers": 20500, "apps": 4700, "testing": 2000,
}  # fmt: skip
"""lines of each room at most"""
FOREIGN = re.compile(r"(^|/)(request|requests|bodies|compat|wire|native)\.py$")
"""files that hold the types of APIs that others define, whose fields may be anything"""


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


IRREGULAR = words(
    "found said told kept held given asked known made begun gone done sent left lost written spoken taken shown seen "
    "chosen drawn grown thrown broken hidden bound built bought brought caught fed felt fought heard laid led lent "
    "meant met paid sold sought spent stood stuck taught thought understood won worn woven"
)
PRONOUNS = words(
    "whose mine ours theirs its own same other others another nobody anybody everybody somebody none nothing anything "
    "everything something nowhere both each either neither all any who whom which what that this these those them they "
    "it him her me us again"
)
ADJECTIVES = words(
    "whole bare plain sound new old odd good bad fine able alive aside away big small large long short late early free "
    "full empty private loud quiet silent usual unusual strange foreign ready due"
)
NOUNS = words("seed feed need speed embed bed shed thread spread breed deed weed reed bleed red")
"""words in -ed that are no participles"""
QUESTIONS = ("is_", "has_", "was_", "are_", "can_", "may_", "must_", "should_", "does_", "had_", "needs_", "wants_")


class Figures(NamedTuple):
    """What is counted of one room."""

    files: int
    lines: int
    median: int
    longest: int
    foreign_any: int
    any: int
    comments: int
    flat: int
    floors: int
    unplain: int


def modules(*rooms: str) -> Iterator[Path]:
    """Every file of Python in these rooms, of all where none is named."""
    for room in rooms or ROOMS:
        yield from sorted((ROOT / room).rglob("*.py"))


def name_of(path: Path) -> str:
    """A file as the imports name it."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("millrace", *(parts[:-1] if parts[-1] == "__init__" else parts)))


@cache
def tree_of(path: Path) -> ast.Module:
    """A file, parsed."""
    return ast.parse(path.read_text())


@cache
def files_by_name() -> Mapping[str, Path]:
    """Every file of the product by the name that imports give it."""
    return {name_of(path): path for path in modules()}


@cache
def imports_of(path: Path) -> frozenset[str]:
    """The modules of the product that a file imports, for types alone too."""
    known, out = files_by_name(), set[str]()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            out |= {alias.name for alias in node.names} & known.keys()
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                out |= {name if name in known else node.module} & known.keys()
    return frozenset(out - {name_of(path)})


@cache
def importers() -> Mapping[str, frozenset[str]]:
    """Of each module, those that import it."""
    out: dict[str, set[str]] = defaultdict(set)
    for path in modules():
        for name in imports_of(path):
            out[name].add(name_of(path))
    return {name: frozenset(users) for name, users in out.items()}


def is_unplain(name: str) -> bool:
    """Whether a name is a participle, an adjective or a pronoun, by its last word."""
    if name.startswith("_"):
        name = name.strip("_")
    if not name or name.startswith(QUESTIONS):
        return False
    word = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().rpartition("_")[2]
    participle = word in IRREGULAR or (word.endswith("ed") and len(word) > 4 and word not in NOUNS)
    return participle or ((word in PRONOUNS or word in ADJECTIVES) and word == name.lower())


def names_in(path: Path, *, locals_too: bool = False) -> Iterator[str]:
    """The names that a file gives: of itself, its classes, functions, arguments and fields, as
    `Class.function(argument)`; with `locals_too` those of variables inside functions."""
    yield path.stem if path.stem != "__init__" else path.parent.name
    yield from _names(tree_of(path), "", locals_too, inside=False)


def _names(node: ast.AST, at: str, locals_too: bool, *, inside: bool) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.ClassDef():
                yield f"{at}{child.name}"
                yield from _names(child, f"{at}{child.name}.", locals_too, inside=False)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if not inside or locals_too:
                    yield f"{at}{child.name}"
                    arguments = [*child.args.posonlyargs, *child.args.args, *child.args.kwonlyargs]
                    yield from (f"{at}{child.name}({one.arg})" for one in arguments)
                yield from _names(child, f"{at}{child.name}.", locals_too, inside=True)
            case ast.Name(ctx=ast.Store()) if locals_too or not inside:
                yield f"{at}{child.id}"
            case _:
                yield from _names(child, at, locals_too, inside=inside)


def last_name(qualified: str) -> str:
    """The name that `names_in` gives last in `Class.function(argument)`."""
    return re.split(r"[.(]", qualified.rstrip(")"))[-1]


def flat_files(folder: Path) -> list[Path]:
    """The files that lie in a folder itself."""
    return sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")


def floors(folder: Path) -> int:
    """How many of a folder's own files the longest chain of imports among them has. Raises ValueError for a circle."""
    below = {name_of(path): imports_of(path) for path in flat_files(folder)}
    height: dict[str, int] = {}
    while len(height) < len(below):
        ready = {name for name in below.keys() - height.keys() if below[name] & below.keys() <= height.keys()}
        if not ready:
            raise ValueError(f"the imports in {folder} have a circle: {sorted(below.keys() - height.keys())}")
        height |= {name: 1 + max((height[one] for one in below[name] & height.keys()), default=0) for name in ready}
    return max(height.values(), default=0)


def figures(room: str) -> Figures:
    """What `Figures` counts of one room."""
    files = list(modules(room))
    texts = [path.read_text() for path in files]
    lines = [text.count("\n") for text in texts]
    counted = [(path, len(re.findall(r"\bAny\b", text))) for path, text in zip(files, texts, strict=True)]
    foreign = sum(count for path, count in counted if FOREIGN.search(path.as_posix()))
    folders = {path.parent for path in files}
    return Figures(
        len(files),
        sum(lines),
        int(statistics.median(lines)),
        max(lines),
        foreign,
        sum(count for _, count in counted) - foreign,
        sum(_comments(text) for text in texts),
        max(len(flat_files(folder)) for folder in folders),
        max(floors(folder) for folder in folders),
        sum(is_unplain(last_name(name)) for path in files for name in names_in(path, locals_too=True)),
    )


def _comments(text: str) -> int:
    return sum(token.type == tokenize.COMMENT for token in tokenize.generate_tokens(io.StringIO(text).readline))


def table() -> list[str]:
    """The figures of every room, a line each, and of all."""
    head = tuple(
        "room files lines budget median longest Any/kloc foreign #/kloc flat floors unplain".split()  # noqa: SIM905
    )
    rows, total = [head], [0] * 3
    for room in ROOMS:
        one = figures(room)
        total = [a + b for a, b in zip(total, (one.files, one.lines, one.unplain), strict=True)]
        per = [f"{1000 * count / one.lines:.1f}" for count in (one.any, one.foreign_any, one.comments)]
        sizes = map(str, (one.files, one.lines, BUDGET.get(room, 0), one.median, one.longest))
        rows.append((room, *sizes, *per, str(one.flat), str(one.floors), str(one.unplain)))
    rows.append(("all", str(total[0]), str(total[1]), str(sum(BUDGET.values())), *[""] * 7, str(total[2])))
    widths = [max(len(row[at]) for row in rows) for at in range(len(head))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


if __name__ == "__main__":
    print("\n".join(table()))
