"""The laws of the house, as far as a script can hold them. What is not yet so stands here by name or number: such a
list may shrink and never grows."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.support.house import (
    ROOMS,
    ROOT,
    figures,
    files_by_name,
    flat_files,
    floors,
    importers,
    imports_of,
    is_unplain,
    last_name,
    modules,
    name_of,
    names_in,
    tree_of,
)

MOST_LINES = 600
MOST_IMPORTS = 25
MOST_ANY = 8
"""`Any` in 1,000 lines of a room: always fewer, but for the files with the types of foreign APIs"""
SMALL = 80

GENERATED = "schemas/records.py"
WIDE = {
    "consumers.learner.build": 31,
    "consumers.replay.branch.run": 38,
    "producers.gateway.serve": 32,
    "producers.gateway.sessions.sessions": 26,
}
"""modules that import more of ours than they may, and how many"""
SMALL_WITH_ONE_USER = 15
"""files under `SMALL` lines whose one user stands beside them"""
REGISTRY = "millrace.trainers.algorithms.registry"
"""the user of algorithms, each of which is a file beside its equation however short"""
FLAT = {"dialects": (13, 10)}
"""folders with too many files on too many floors: at most so many"""
OPENERS = {
    "consumers/audit/folds.py": "compares a changelog, byte for byte, with the state that a fold gives",
    "consumers/audit/refold.py": "fetches the record that a turn names, decodable or not",
    "consumers/audit/walk.py": "fetches the records that others point at, decodable or not",
    "consumers/learner/group/membership.py": "is a member of the learners' group",
    "consumers/replay/rebuild/law.py": "fetches what an emission became, as it lies",
    "consumers/warehouse/ingest/ingest.py": "takes the log's own bytes into tables",
    "consumers/warehouse/ingest/shares.py": "is a member of the group that shares partitions",
    "consumers/warehouse/ingest/topic_identity.py": "compares a record with the digest of what came from its place",
    "formats/exports/gather.py": "fetches the trajectories that the ledger places, some at a time",
    "producers/gateway/calls/policy_joining.py": "waits for a policy whose topics may not exist",
    "producers/gateway/calls/workers_watch.py": "follows engines in a thread of its own",
    "producers/rollout/worker.py": "is a member of the workers' group",
    "streams/reward/conversation.py": "reads one episode back from the record of its end",
}
"""modules that open topics by themselves, and why the reader of `infra/log/history` does not serve them"""
SCRIPTS = ("__init__.py", "digests.py", "house.py", "order.py", "summary.py", "unhurried.py")
"""files of tests/support that people, pytest or an engine start"""
PLAIN = frozenset({"all", "deepspeed"})
UNPLAIN = {
    "apps": 3, "consumers": 48, "dialects": 41, "formats": 7, "infra": 29, "producers": 14,
    "schemas": 24, "streams": 11, "testing": 6, "trainers": 35,
}  # fmt: skip
"""public names of each room that are a participle, an adjective or a pronoun: at most so many"""


def test_no_file_is_too_long() -> None:
    lines = {path.relative_to(ROOT).as_posix(): path.read_text().count("\n") for path in modules()}
    assert {name for name, count in lines.items() if count > MOST_LINES} == {GENERATED}


def test_no_module_imports_too_many_of_ours() -> None:
    counts = {name_of(path).removeprefix("millrace."): len(imports_of(path)) for path in modules()}
    wide = {name: count for name, count in counts.items() if count > MOST_IMPORTS}
    assert wide.keys() <= WIDE.keys()
    assert all(count <= WIDE[name] for name, count in wide.items()), wide


def test_small_files_live_in_their_one_user() -> None:
    small = [
        name
        for name, path in files_by_name().items()
        if path.name != "__init__.py"
        and {REGISTRY} != importers().get(name)
        and path.read_text().count("\n") < SMALL
        and [user.rpartition(".")[0] for user in importers().get(name, ())] == [name.rpartition(".")[0]]
    ]
    assert len(small) <= SMALL_WITH_ONE_USER, f"put a small file into its one user: one of {small} is new"


def test_support_that_tests_of_one_folder_use_lies_there() -> None:
    folder = ROOT / "tests" / "support"
    files = {f"tests.support.{path.stem}": path for path in folder.glob("*.py") if path.name not in SCRIPTS}
    imports = re.compile(r"^\s*from (tests\.support(?:\.\w+)?) import ([\w, ]+|\([^)]*\))", re.MULTILINE)
    users: dict[str, set[Path]] = {name: set() for name in files}
    for path in [*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        for module, names in imports.findall(path.read_text()):
            for name in {module, *(f"{module}.{name}" for name in re.findall(r"\w+", names))} & files.keys():
                users[name].add(path.parent)
    assert {name for name, folders in users.items() if len(folders) == 1 and folders != {folder}} == set()


def test_no_room_is_flat_and_high() -> None:
    found = {
        folder.relative_to(ROOT).as_posix(): (len(flat_files(folder)), floors(folder))
        for folder in {path.parent for path in modules()}
        if len(flat_files(folder)) > 12 and floors(folder) > 6
    }
    assert found.keys() <= FLAT.keys()
    assert all(figures <= FLAT[name] for name, figures in found.items()), found


def test_who_opens_topics_by_itself_says_why() -> None:
    opening = re.compile(r"bus\.(read|tail|member|fetch)\(")
    rooms = [room for room in ROOMS if room not in ("infra", "testing")]
    found = {path.relative_to(ROOT).as_posix() for path in modules(*rooms) if opening.search(path.read_text())}
    assert found <= OPENERS.keys(), "read topics through `infra.log.history`"


@pytest.mark.parametrize("room", ROOMS)
def test_few_values_are_of_any_type(room: str) -> None:
    one = figures(room)
    assert 1000 * one.any / one.lines < MOST_ANY, "name its type; a value that is only passed on is an `object`"


def test_no_module_is_named_by_a_participle() -> None:
    names = {path.stem if path.stem != "__init__" else path.parent.name for path in modules()}
    assert {name for name in names if is_unplain(name)} <= PLAIN


def test_what_a_text_imports_of_ours_exists() -> None:
    """The scripts that tests write, and the pages: neither mypy nor an import sees them before they run."""
    lines = re.compile(r"^\s*from (millrace[\w.]*) import ([\w, ]+)", re.MULTILINE)
    texts = [path for suffix in ("py", "md") for path in ROOT.rglob(f"*.{suffix}") if is_ours(path)]
    imports = {(module, name.split()[0]) for path in texts for module, names in lines.findall(path.read_text())
               for name in names.split(",") if name.strip()}  # fmt: skip
    assert len(imports) > 1000
    absent = [(module, name) for module, name in sorted(imports) if not has(module, name)]
    assert absent == []


def is_ours(path: Path) -> bool:
    """Whether a file is kept in the repository: no file of an environment or a tool."""
    return not any(part.startswith((".", "build")) for part in path.relative_to(ROOT).parts)


def has(module: str, name: str) -> bool:
    """Whether a module of ours, not imported, has a name or a module of that name in it."""
    place = ROOT.joinpath(*module.split(".")[1:])
    if (place / f"{name}.py").exists() or (place / name / "__init__.py").exists():
        return True
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    nodes = list(ast.walk(tree_of(file))) if file.exists() else []
    return name in {
        *(node.asname or node.name for node in nodes if isinstance(node, ast.alias)),
        *(node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)),
        *(node.id for node in nodes if isinstance(node, ast.Name)),
    }


@pytest.mark.parametrize("room", ROOMS)
def test_no_new_public_name_is_a_participle(room: str) -> None:
    counted = Counter(
        name_of(path)
        for path in modules(room)
        for name in names_in(path)
        if name != path.stem and not last_name(name).startswith("_") and "._" not in f".{name}"
        if is_unplain(last_name(name))
    )
    assert counted.total() <= UNPLAIN[room], f"name it by what it is; the most are in {counted.most_common(5)}"
