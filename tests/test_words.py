"""One word, one thing: a class name that two modules of the product define is two things under one word, or one twice.

Some names may be shared, since the folder that they stand in says the rest:

- a leading underscore: nobody outside the file meets it;
- what is generated from the Avro schemas: it is named after a record on the wire;
- a table of the settings (`Section`): it is named after the table that users write;
- a law of the audit (`Law`): it is named after what it checks;
- siblings of one seam (`SEAMS`): each is named after the format, the tool or the API that it speaks.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path
from typing import get_args

from millrace.infra.engines.kinds import KINDS, KindName
from tests.support.house import ROOMS

ROOT = Path(__file__).parents[1]
GENERATED = "schemas/records.py"
SEAMS = frozenset(
    {"Section", "Law", "ExportLayout", "ImportLayout", "Prompt", "Chat", "Preference", "Jsonl"}
    | {"DialectReader", "RowReader", "Sink", "TaskSource", "Dialect"}
)


def defined() -> dict[str, set[str]]:
    """The modules that define each public class, without those that may share their names."""
    found: dict[str, set[str]] = defaultdict(set)
    for room in set(ROOMS) - {"testing"}:
        for path in sorted((ROOT / room).rglob("*.py")):
            module = path.relative_to(ROOT).as_posix()
            if module == GENERATED:
                continue
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not free(node):
                    found[node.name].add(module)
    return found


def free(node: ast.ClassDef) -> bool:
    return node.name.startswith("_") or any(isinstance(base, ast.Name) and base.id in SEAMS for base in node.bases)


def test_no_class_name_is_given_twice() -> None:
    doubled = {name: sorted(modules) for name, modules in defined().items() if len(modules) > 1}
    assert not doubled, f"name the new class after what it holds; another one has its name already: {doubled}"


ENGINES = re.compile(r"vllm|sglang", re.IGNORECASE)
VALUES = {
    "infra/config/serving.py": {'    kind: KindName = Field(default="vllm", '},
    "trainers/backends/layout.py": {
        "    allocation  sglang[rollout]:d2+fsdp[actor]:d4|fsdp[critic]:d4",
        '"vllm": "dtp", "sglang": "dtp"}',
        'ENGINES = ("vllm", "sglang")',
    },
    "schemas/records.py": {'    """vllm, inprocess or openai"""'},
    "consumers/warehouse/questions/views/model_calls.sql": {"-- engine: vllm or inprocess; openai, "},
}
"""where settings and records have the name of an engine as a value: file -> parts of its lines"""


def test_engines_are_named_in_their_room_alone() -> None:
    """Who else knew which engine it is would have to learn of each new one."""
    files = [
        path
        for room in (*ROOMS, "testing")
        for path in sorted((ROOT / room).rglob("*"))
        if path.suffix in (".py", ".sql", ".jinja") and not path.is_relative_to(ROOT / "infra" / "engines")
    ]
    wrong = []
    for path in files:
        module = path.relative_to(ROOT).as_posix()
        values = VALUES.get(module, set())
        for at, line in enumerate(path.read_text().splitlines(), 1):
            if ENGINES.search(line) and not any(value in line for value in values):
                wrong.append(f"{module}:{at}: {line.strip()}")
    assert not wrong, "what depends on the engine stands behind infra/engines/kind.py:\n" + "\n".join(wrong)


def test_nobody_asks_which_kind_an_engine_is() -> None:
    """A kind is compared with no name, nor matched with one: `KINDS[name]` answers what differs."""
    wrong = []
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Compare | ast.Match):
                    asked = [node.subject] if isinstance(node, ast.Match) else [node.left, *node.comparators]
                    if any(ast.unparse(one).endswith(("engine.kind", "engine['kind']")) for one in asked):
                        wrong.append(f"{path.relative_to(ROOT).as_posix()}:{node.lineno}")
    assert not wrong, f"ask `KINDS` of infra/engines/kinds.py: {wrong}"


def test_every_kind_has_its_setting_and_its_folder() -> None:
    folders = {path.parent.name for path in (ROOT / "infra" / "engines").glob("*/kind.py")}
    assert {*KINDS} == {*get_args(KindName)} == folders == {kind.name for kind in KINDS.values()}
