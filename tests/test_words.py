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
from collections import defaultdict
from pathlib import Path

from tests.support.house import ROOMS

ROOT = Path(__file__).parents[1]
GENERATED = "schemas/records.py"
SEAMS = frozenset(
    {"Section", "BaseSettings", "Law", "ExportLayout", "ImportLayout", "Prompt", "Chat", "Preference", "Jsonl"}
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
