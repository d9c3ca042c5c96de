"""Avro's binary form of a schema's records, read and written by functions that are made for that schema.

fastavro asks of each value what type it has and which branch of its union fits. Here that is decided once, in the text
of a function for each record, which then reads or writes field after field.

Invariant: what these functions give is what fastavro gives, to the byte. For whatever they are not made for they raise
any error, and fastavro accepts or refuses it: a value of another type, a key too few or too many, bytes that are none.
Unions are of null and one other type; no other schema has functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from struct import Struct
from typing import Any, NamedTuple


class Binary(NamedTuple):
    """The functions of a record."""

    read: Callable[[bytes, int], tuple[dict[str, Any], int]]
    """the record at a place in bytes, and where it ends: behind the bytes, where these are not whole"""
    write: Callable[[Any, Callable[[bytes], object]], None]
    """hands over the bytes of a record piece by piece"""


def binary_of(record: Mapping[str, Any]) -> Binary:
    """The functions for the expanded schema of a record."""
    names: dict[str, Any] = {"long": _long, "size": _size, "long_bytes": _long_bytes, "double": Struct("<d")}
    names |= {"small": tuple(bytes([n]) for n in range(128)), "byte_boolean": {False: b"\0", True: b"\1"}}
    names |= {"symbol_boolean": (False, True)}
    lines: list[str] = []
    for full, schema in record["__named_schemas"].items():
        name = _short(full)
        if schema["type"] == "enum":
            symbols = list(enumerate(schema["symbols"][:64]))  # a later one has two bytes
            names[f"symbol_{name}"] = {2 * n: symbol for n, symbol in symbols}
            names[f"byte_{name}"] = {symbol: bytes([2 * n]) for n, symbol in symbols}
        else:
            lines += _functions(name, [(field["name"], field["type"]) for field in schema["fields"]])
    exec("\n".join(lines), names)
    name = _short(record["name"])
    return Binary(names[f"read_{name}"], names[f"write_{name}"])


def _long(data: bytes, at: int) -> tuple[int, int]:
    """A number as it is written, and where it ends."""
    number = shift = 0
    while (byte := data[at]) > 127:
        number |= (byte & 127) << shift
        shift += 7
        at += 1
    number |= byte << shift
    if number >> 64 or shift > 63:
        raise OverflowError("a number has more than 64 bits")
    return number, at + 1


def _size(data: bytes, at: int) -> tuple[int, int]:
    """A number that is not negative and has more than one byte, and where it ends."""
    low, high = data[at], data[at + 1]
    if low & 1:
        raise ValueError("a size is negative")
    if high > 127:
        low, at = _long(data, at)
        return low >> 1, at
    return (low & 127 | high << 7) >> 1, at + 2


def _long_bytes(number: int) -> bytes:
    """How a number is written, seven bits a byte, its sign in the lowest bit already."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def _functions(name: str, fields: list[tuple[str, Any]]) -> list[str]:
    """The text of the two functions of a record."""
    read, write = [], [f"if len(record) != {len(fields)}: raise KeyError"]
    for n, (field, kind) in enumerate(fields):
        read += _reading(kind, f"f{n}")
        write += [f"v = record[{field!r}]", *_writing(kind, "v")]
    record = ", ".join(f"{field!r}: f{n}" for n, (field, _) in enumerate(fields))
    read.append(f"return {{{record}}}, at")
    return [f"def read_{name}(data, at):", *_inside(read), f"def write_{name}(record, put):", *_inside(write)]


_SIZE = ["n = data[at]", "at += 1", "if n & 129: n, at = size(data, at - 1)", "else: n >>= 1"]
_PUT_SIZE = "put(small[2 * n] if n < 64 else long_bytes(2 * n))"
_BITS = {"int": 31, "long": 63}


def _reading(kind: Any, to: str) -> list[str]:
    """What reads a value of a type from `data` at `at` into a variable."""
    if isinstance(kind, list):
        null, branch, inner = _branches(kind)
        some = [f"elif n == {branch}:", *_inside(_reading(inner, to)), "else: raise ValueError"]
        return ["n = data[at]", "at += 1", f"if n == {null}: {to} = None", *some]
    match _type_of(kind):
        case "int" | "long":
            return ["n = data[at]", "at += 1", "if n > 127: n, at = long(data, at - 1)", f"{to} = n >> 1 ^ -(n & 1)"]
        case "double":
            return [f"({to},) = double.unpack_from(data, at)", "at += 8"]
        case "string":
            return [*_SIZE, f"{to} = data[at : at + n].decode()", "at += n"]
        case "bytes":
            return [*_SIZE, f"{to} = data[at : at + n]", "at += n"]
        case "boolean" | "enum":
            return [f"{to} = symbol_{_short(kind)}[data[at]]", "at += 1"]
        case "array":
            item = [*_reading(kind["items"], f"{to}_"), f"{to}.append({to}_)"]
            return [f"{to} = []", *_SIZE, "while n:", *_inside(["for _ in range(n):", *_inside(item), *_SIZE])]
        case "map":
            entry = [*_reading("string", f"{to}k"), *_reading(kind["values"], f"{to}_"), f"{to}[{to}k] = {to}_"]
            return [f"{to} = {{}}", *_SIZE, "while n:", *_inside(["for _ in range(n):", *_inside(entry), *_SIZE])]
    return [f"{to}, at = read_{_short(kind)}(data, at)"]


def _writing(kind: Any, of: str) -> list[str]:
    """What hands the bytes of a variable of a type to `put`."""
    if isinstance(kind, list):
        null, branch, inner = _branches(kind)
        some = [f"put(small[{branch}])", *_writing(inner, of)]
        return [f"if {of} is None: put(small[{null}])", "else:", *_inside(some)]
    match what := _type_of(kind):
        case "int" | "long":
            low, high = -(1 << _BITS[what]), 1 << _BITS[what]
            check = f"if type({of}) is not int or not {low} <= {of} < {high}: raise TypeError"
            return [check, f"n = {of} << 1 ^ {of} >> 63", "put(small[n] if n < 128 else long_bytes(n))"]
        case "double":
            return [f"if type({of}) is not float: raise TypeError", f"put(double.pack({of}))"]
        case "string":
            return [f"b = {of}.encode()", "n = len(b)", _PUT_SIZE, "put(b)"]
        case "bytes":
            return [f"if type({of}) is not bytes: raise TypeError", f"n = len({of})", _PUT_SIZE, f"put({of})"]
        case "boolean" | "enum":
            return [f"put(byte_{_short(kind)}[{of}])"]
        case "array":
            check = f"if type({of}) is not list: raise TypeError"
            items = [f"for {of}_ in {of}:", *_inside(_writing(kind["items"], f"{of}_"))]
            return [check, f"n = len({of})", f"if n: {_PUT_SIZE}", *items, "put(small[0])"]
        case "map":
            check = f"if type({of}) is not dict: raise TypeError"
            entry = [*_writing("string", f"{of}k"), *_writing(kind["values"], f"{of}_")]
            items = [f"for {of}k, {of}_ in {of}.items():", *_inside(entry)]
            return [check, f"n = len({of})", f"if n: {_PUT_SIZE}", *items, "put(small[0])"]
    return [f"write_{_short(kind)}({of}, put)"]


def _inside(lines: list[str]) -> list[str]:
    return [f" {line}" for line in lines]


def _branches(union: list[Any]) -> tuple[int, int, Any]:
    """How the branches of null and of the other type are written, and that type."""
    (inner,) = (kind for kind in union if kind != "null")
    return 2 * union.index("null"), 2 * union.index(inner), inner


def _type_of(kind: Any) -> str:
    return str(kind["type"] if isinstance(kind, dict) else kind)


def _short(kind: Any) -> str:
    """How the functions or tables of a named type are called."""
    return str(kind["name"] if isinstance(kind, dict) else kind).rpartition(".")[2]
