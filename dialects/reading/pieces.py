"""A message of unknown fields put together again from the pieces in which it was streamed.

Invariants: texts follow each other, lists grow, maps are put together the same way one level deep, and anything else is
as it came last; a message that came in one piece is itself; there are at most `FIELDS` fields, and at most
`bounds.VALUES` values in all lists."""

from __future__ import annotations

from collections.abc import Mapping

from millrace.schemas import bounds
from millrace.schemas.json_values import Json, JsonObject

FIELDS = 64
LASTING = frozenset({"role", "id", "type", "name", "object"})
"""texts that name something: each is told whole, however often"""


class Pieces:
    """The fields that came. `outer`: those that a map among these is put together for, whose room it shares."""

    def __init__(self, outer: Pieces | None = None) -> None:
        self.room = bounds.VALUES // 2
        """values that lists may still take"""
        self._outer = outer
        self._fields: dict[str, Json | Pieces] = {}

    def take(self, fields: Mapping[str, Json]) -> bool:
        """One more piece of each of these fields; whether all of them found room."""
        has_room = True
        for name, value in fields.items():
            if value is not None:
                has_room &= (name in self._fields or len(self._fields) < FIELDS) and self._take(name, value)
        return has_room

    def _take(self, name: str, value: Json) -> bool:
        match value, self._fields.get(name):
            case str(), _ if name in LASTING:
                if value or name not in self._fields:
                    self._fields[name] = value
            case str(), _Text() as field:
                field.append(value)
            case str(), _:
                self._fields[name] = _Text([value])
            case list(), field:
                size = _values(value)
                owner = self._outer or self
                if size > owner.room:
                    return False
                owner.room -= size
                if type(field) is not list:
                    field = self._fields[name] = []
                field += value
            case dict(), Pieces() as field:
                return field.take(value)
            case dict(), _ if self._outer is None:
                field = self._fields[name] = Pieces(self)
                return field.take(value)
            case _:
                self._fields[name] = value
        return True

    def whole(self) -> JsonObject:
        """The fields as far as they came."""
        return {name: _to_json(value) for name, value in self._fields.items()}


class _Text(list[str]):
    """Pieces of one text."""


def _to_json(value: Json | Pieces) -> Json:
    if isinstance(value, _Text):
        return "".join(value)
    return value.whole() if isinstance(value, Pieces) else value


def _values(items: list[Json]) -> int:
    """How many values a list holds, on all levels."""
    count, rest = 0, list[Json](items)
    while rest:
        value = rest.pop()
        count += 1
        if isinstance(value, list):
            rest += value
        elif isinstance(value, dict):
            rest += value.values()
    return count
