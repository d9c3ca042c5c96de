"""JSON values of the types that API clients publish (TypedDicts and what stands in them)."""

from __future__ import annotations

import collections.abc
import types
import typing
from functools import cache
from typing import Any

import typing_extensions
from hypothesis import strategies as st

WORDS = st.text(max_size=6)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: WORDS,
    int: st.integers(0, 9),
    float: st.floats(0, 1),
    bool: st.booleans(),
    type(None): st.none(),
}
MANY = (list, collections.abc.Iterable, collections.abc.Sequence)
REQUIRED = (typing.Required, typing_extensions.Required)
WRAPPED = (*REQUIRED, typing.Annotated, typing.NotRequired)


@cache
def values(of: Any) -> st.SearchStrategy[Any]:
    """JSON of a type; what has no JSON form (pydantic models, file handles) is left out of unions."""
    origin, inner = typing.get_origin(of), typing.get_args(of)
    if of in PLAIN:
        return PLAIN[of]
    if typing_extensions.is_typeddict(of):
        return st.deferred(lambda: _fields(of))
    if origin in WRAPPED:
        return values(inner[0])
    if origin in (typing.Union, types.UnionType):
        return st.one_of([found for each in inner if not (found := values(each)).is_empty])
    if origin is typing.Literal:
        return st.sampled_from(inner)
    if origin in MANY:
        return st.lists(st.deferred(lambda: values(inner[0])), max_size=2)
    if origin in (dict, collections.abc.Mapping):
        return st.dictionaries(WORDS, st.deferred(lambda: values(inner[1])), max_size=2)
    return st.none() | WORDS if of in (object, Any) else st.nothing()


def _fields(of: Any) -> st.SearchStrategy[Any]:
    hints = typing_extensions.get_type_hints(of, include_extras=True)
    # Where annotations are text, as there, only the hints tell what a field of a class with `total=False` needs.
    needed = {name for name, hint in hints.items() if typing.get_origin(hint) in REQUIRED} | of.__required_keys__
    found = {name: values(hint) for name, hint in hints.items()}
    rest = {name: each for name, each in found.items() if name not in needed}
    return st.fixed_dictionaries({name: found[name] for name in needed}, optional=rest)
