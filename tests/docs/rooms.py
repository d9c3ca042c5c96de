"""The drawing of the imports, room by room: `python -m tests.docs.rooms` writes docs/rooms.svg anew.

Invariant: it shows what the modules import, and nothing that the linter's contracts say; an arrow upwards would be
drawn upwards."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "rooms.svg"
PLACES = {
    "apps": (380, 40),
    "consumers": (380, 150),
    "producers": (160, 250),
    "streams": (440, 250),
    "trainers": (620, 250),
    "formats": (160, 340),
    "dialects": (230, 430),
    "infra": (380, 500),
    "schemas": (380, 580),
}
"""the middle of each room's box"""
WIDE, HIGH = 130, 44
BENT = {("apps", "producers"): -150, ("apps", "trainers"): 150, ("apps", "streams"): 90, ("apps", "infra"): -190,
        ("apps", "schemas"): 300, ("apps", "dialects"): -70, ("consumers", "schemas"): 250,
        ("consumers", "infra"): 60, ("producers", "schemas"): -190, ("producers", "infra"): 60,
        ("formats", "schemas"): -120, ("formats", "infra"): 90, ("streams", "schemas"): 100,
        ("streams", "infra"): 20, ("trainers", "schemas"): 60}  # fmt: skip
"""how far an arrow that would cross a box swings to the side"""


def imports() -> dict[tuple[str, str], int]:
    """How many modules of one room import something of another, but for types alone."""
    out: Counter[tuple[str, str]] = Counter()
    for room in PLACES:
        for path in (ROOT / room).rglob("*.py"):
            out.update((room, other) for other in set(_rooms(ast.parse(path.read_text()))) - {room})
    return dict(sorted(out.items()))


def _rooms(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        names = [child.module or ""] if isinstance(child, ast.ImportFrom) else []
        names += [alias.name for alias in child.names] if isinstance(child, ast.Import) else []
        if isinstance(child, ast.ImportFrom) and child.module == "millrace":
            names += [f"millrace.{alias.name}" for alias in child.names]
        for name in names:
            package, _, rest = name.partition(".")
            if package == "millrace" and (room := rest.partition(".")[0]) in PLACES:
                yield room
        yield from _rooms(child)


def drawn(found: Mapping[tuple[str, str], int]) -> str:
    """The picture."""
    out = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 620" font-family="sans-serif" font-size="14">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#7a869a"/></marker></defs>',
        '<rect width="760" height="620" fill="#ffffff"/>',
    ]
    for pair, count in found.items():
        out += _arrow(pair, count)
    for room, (x, y) in PLACES.items():
        out.append(
            f'<rect x="{x - WIDE // 2}" y="{y - HIGH // 2}" width="{WIDE}" height="{HIGH}" rx="8" fill="#e8eefc" '
            'stroke="#3b5bdb"/>'
        )
        out.append(f'<text x="{x}" y="{y + 5}" text-anchor="middle" fill="#1c2b4a">{room}/</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def _arrow(pair: tuple[str, str], count: int) -> list[str]:
    (x, y), (to_x, to_y) = PLACES[pair[0]], PLACES[pair[1]]
    down = 1 if to_y > y else -1
    y, to_y = y + down * HIGH // 2, to_y - down * HIGH // 2
    x, to_x = x + (to_x - x) // 8, to_x - (to_x - x) // 8
    middle_x, middle_y = (x + to_x) // 2 + BENT.get(pair, 0), (y + to_y) // 2
    at_x, at_y = (x + 2 * middle_x + to_x) // 4, (y + 2 * middle_y + to_y) // 4
    path = (
        f'<path d="M{x} {y} Q{middle_x} {middle_y} {to_x} {to_y}" fill="none" stroke="#7a869a" marker-end="url(#tip)"/>'
    )
    said = (
        f'<text x="{at_x}" y="{at_y + 4}" text-anchor="middle" font-size="11" fill="#44506a" stroke="#ffffff" '
        f'stroke-width="3" paint-order="stroke">{count}</text>'
    )
    return [path, said]


if __name__ == "__main__":
    PICTURE.write_text(drawn(imports()))
