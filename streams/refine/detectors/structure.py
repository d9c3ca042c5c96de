"""What a name beside a value says of it: keys of JSON and YAML, fields of logs, columns of SQL and tables, headers.

Invariants: every hit is a label, since a name beside a value is a claim of whoever wrote it; a value that is plainly no
person (a number where a name is due, a type, a placeholder) is none; time is linear in the text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

KINDS = ("address", "birth_date", "identity", "person", "telephone")
_KEYS = {
    "person": r"(?:full|first|last|middle|given|family|sur|maiden|birth|customer|patient|client|employee|guest|contact|"
    r"passenger|recipient|cardholder|account_?holder|beneficiary|holder|sender|signer|nick|display|legal|preferred)"
    r"[_ -]?name|surname|assignee|ship(?:ped)?[_ -]?to|bill(?:ed)?[_ -]?to|customer|patient|passenger|recipient|"
    r"requester|reporter|attendee|cardholder|beneficiary",
    "address": r"(?:street|home|postal|mailing|shipping|billing|delivery|residential|customer|work)?[_ -]?address"
    r"(?:[_ -]?line)?[_ -]?[0-9]?|"
    r"street(?:[_ -]?name)?|ship(?:ping)?[_ -]?address",
    "birth_date": r"dob|birth[_ -]?da(?:te|y)|date[_ -]?of[_ -]?birth|born(?:[_ -]?on)?",
    "telephone": r"(?:phone|mobile|cell|tel(?:ephone)?|fax)(?:[_ -]?(?:number|no|nr))?|"
    r"(?:home|work|contact)[_ -]?phone",
    "identity": r"ssn|social[_ -]?security(?:[_ -]?(?:number|no))?|passport(?:[_ -]?(?:number|no|nr|id))?|"
    r"national[_ -]?id(?:entity)?(?:[_ -]?(?:number|no))?|id[_ -]?card(?:[_ -]?(?:number|no))?|"
    r"(?:driver'?s?|driving)[_ -]?licen[cs]e(?:[_ -]?(?:number|no))?|tax[_ -]?id|nino|aadhaar|cpf|dni|nif|curp",
}
"""kind -> how keys of it are called"""
_WEAK = r"name|user(?:_?name)?|author|owner|from|to|cc|bcc|reply[_-]?to|attn|contact"
"""keys of persons and of much else: what stands there must look like the name of one"""
_NAMES = "|".join([*(f"(?P<{kind}>{words})" for kind, words in _KEYS.items()), f"(?P<weak>{_WEAK})"])
_KEY = re.compile(rf"(?:^|(?<=[^A-Za-z0-9]))(?:{_NAMES})\Z".encode(), re.IGNORECASE)
_KEY_END = re.compile(rb"[A-Za-z0-9_ '-]{0,40}?(?=[\"'`*]{0,2}\s{0,2}[:=])")
_FIELD = re.compile(
    rb"[\"'`*]{0,2}\s{0,2}(?P<sign>[:=])[\"'`*]{0,2}[ \t]{0,2}"
    rb"(?:\"(?P<double>[^\"\n\x00]{1,200})\"|'(?P<single>[^'\n\x00]{1,200})'|(?P<rest>[^\s\"'\[{(,:=<$][^\n\x00]{0,200}))"
)
_ENDS = {
    b"=": re.compile(rb"\s+[\w.-]+=|[,;&|)\]}\t\"']|\s{2}|\s[-\[(]"),
    b":": re.compile(rb"\s{2}|[\t|;}<\"]|\s#|,\s*\Z"),
}
"""where a value that no quotes hold ends, by the sign before it"""
_PERSON = re.compile(r"[^\W\d_][\w'’.-]*(?:,? [^\W\d_][\w'’.-]*){0,5}")
_TYPES = re.compile(
    "str|string|text|none|null|true|false|int|integer|float|bool|boolean|object|array|any|optional|name|user|root|admin|"
    "postgres|nobody|test|guest|ubuntu|git|www-data|self|list|dict|bytes|number|required|unknown|default",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"[0-9+(][0-9+()./ -]*(?:(?:x|ext)\.? ?[0-9]+)?")
_CODE = re.compile(r"(?:self|request|req|args|os|settings|config|ctx|cls|this|obj|data)\.|[a-z]+_[a-z_]+\Z")
_INSERT = re.compile(
    rb"insert\s{1,4}into\s{1,4}[^\s(]{1,200}\s{0,4}\((?P<columns>[^()\x00]{1,4000})\)\s{0,4}values\s{0,4}", re.I
)
_ROW = re.compile(rb"\s{0,4},?\s{0,4}\((?P<cells>(?:'(?:[^'\x00]|'')*+'|[^'()\x00])*+)\)")
_LITERAL = re.compile(rb"'((?:[^'\x00]|'')*+)'|[^,'\x00]+")
_COLUMN = re.compile(rb"\s*[\"'`]?[A-Za-z][A-Za-z0-9_ ./-]{0,40}[\"'`]?\s*")
_QUOTED_CELLS = {
    d: re.compile(rb"\"([^\"\n\x00]*)\"|([^\"\n\x00%b]+)|(?<=[%b])(?=[%b]|\Z)" % (d, d, d))
    for d in (b",", b";", b"|", b"\t")
}
MOST = 2000
"""labels of a text: more would make it an event that nobody reads"""


class Finder(NamedTuple):
    """A trigger for the engine, and what reads on where it began."""

    trigger: bytes
    find: Callable[[bytes, int], Iterator[tuple[int, int, str]]]
    """(start, end, kind) of every value"""


def kind_of(key: bytes) -> str | None:
    """What a key says of its value; `weak` for one of a person only where the value looks so."""
    match = _KEY.search(key.strip(b" \"'`*\t"))
    return match.lastgroup if match is not None else None


def _fields(text: bytes, at: int) -> Iterator[tuple[int, int, str]]:
    end = _KEY_END.match(text, at)
    if end is None:
        return
    first = max(0, at - 32)
    kind = kind_of(text[max(first, text.rfind(b"\n", first, at) + 1) : end.end()])
    field = _FIELD.match(text, end.end())
    if kind is None or field is None:
        return
    group = field.lastgroup or "rest"
    start, stop = field.span(group)
    if group == "rest":
        cut = _ENDS[field["sign"]].search(text, start, stop)
        stop = cut.start() if cut is not None else stop
        if cut is not None and text[cut.start() : cut.start() + 1] == b"<":
            stop = cut.start()
    yield from _judge(text, start, stop, kind)


def _inserts(text: bytes, at: int) -> Iterator[tuple[int, int, str]]:
    match = _INSERT.match(text, at)
    if match is None:
        return
    kinds = _kinds(match["columns"].split(b","))
    row = _ROW.match(text, match.end())
    while row is not None and any(kinds):
        values = [literal for literal in _LITERAL.finditer(text, *row.span("cells")) if literal[0].strip()]
        for kind, literal in zip(kinds, values, strict=False):
            if kind is not None and literal[1] is not None:
                yield from _judge(text, *literal.span(1), kind)
        row = _ROW.match(text, row.end())


def _tables(text: bytes, at: int) -> Iterator[tuple[int, int, str]]:
    """The rows below a line of column names."""
    first = text.rfind(b"\n", max(0, at - 2000), at) + 1
    last = text.find(b"\n", at, at + 2000)
    if last < 0:
        return
    line = text[first:last]
    sign = next((sign for sign in (b"|", b"\t", b";", b",") if sign in line), b",")
    columns = line.strip(b" |\r").split(sign) if sign == b"|" else line.rstrip(b"\r").split(sign)
    kinds = _kinds(columns)
    is_first = kind_of(columns[0]) is not None or not any(kind_of(c) for c in line[: at - first].split(sign)[:-1])
    if len(columns) < 2 or not any(kinds) or not is_first or not all(map(_COLUMN.fullmatch, columns)):
        return
    while True:
        first, last = last + 1, text.find(b"\n", last + 1)
        last = len(text) if last < 0 else last
        cells = _cells(text, first, last, sign)
        if len(cells) != len(columns):
            return
        for kind, (start, end) in zip(kinds, cells, strict=True):
            if kind is not None:
                yield from _judge(text, start, end, kind)
        if last == len(text):
            return


def _cells(text: bytes, first: int, last: int, sign: bytes) -> list[tuple[int, int]]:
    line = text[first:last]
    if sign == b"|":
        first += len(line) - len(line.lstrip(b" |"))
        last -= len(line) - len(line.rstrip(b" |\r"))
        line = text[first:last]
    if b'"' in line:
        return [cell.span(1 if cell[1] is not None else 0) for cell in _QUOTED_CELLS[sign].finditer(text, first, last)]
    cells, at = [], first
    for cell in line.split(sign):
        cells.append((at, at + len(cell)))
        at += len(cell) + 1
    return cells


def _kinds(columns: Sequence[bytes]) -> list[str | None]:
    """The kinds of columns; a name beside others of a person is one too."""
    kinds = [kind_of(column) for column in columns]
    is_person = any(kind not in (None, "weak") for kind in kinds) or any(
        b"mail" in column.lower() for column in columns
    )
    return ["person" if kind == "weak" and is_person else kind for kind in kinds]


def _judge(text: bytes, start: int, end: int, kind: str) -> Iterator[tuple[int, int, str]]:
    raw = text[start:end]
    start += len(raw) - len(raw.lstrip())
    raw = raw.strip(b" \t\r,.\"'*")
    value = raw.decode("utf-8", "replace")
    digits = sum(char.isdigit() for char in value)
    match kind:
        case "person" | "weak":
            is_it = _PERSON.fullmatch(value) is not None and _TYPES.fullmatch(value) is None and not _CODE.match(value)
            is_it = is_it and len(value) > 1 and (kind == "person" or _looks_like_person(value))
            if kind == "person" and not is_it:
                yield from _judge(text, start, end, "address")
        case "address":
            is_it = " " in value and digits > 0 and "://" not in value and sum(char.isalpha() for char in value) > 3
        case "birth_date":
            is_it = 4 <= digits <= 14 and len(value) <= 32
        case "telephone":
            is_it = 6 <= digits <= 20 and _NUMBER.fullmatch(value) is not None
        case _:
            is_it = (
                digits >= 4 and len(value) <= 32 and value.replace(" ", "").replace("-", "").replace(".", "").isalnum()
            )
    if is_it:
        yield start, start + len(raw), "person" if kind == "weak" else kind


def _looks_like_person(value: str) -> bool:
    words = value.replace(",", " ").split()
    if len(words) == 1:
        return (value[0] >= "\u2e80" and 2 <= len(value) <= 6) or ("." in value and value.islower())
    return sum(word[0].isupper() or not (word[0].islower() or word[0].isupper()) for word in words) >= 2


_VALUE = r"[\"'`*]{0,2}\s{0,2}[:=][\"'`*]{0,2}\s{0,2}[\"']?"
FINDERS = (
    Finder(
        (
            r"((full|first|last|middle|given|family|customer|patient|client|employee|guest|contact|passenger|recipient|"
            r"cardholder|account.?holder|beneficiary|holder|sender|maiden|birth|legal|preferred|display|nick|sur|user)"
            r"[_ -]?name|assignee|ship(ped)?[_ -]?to|bill(ed)?[_ -]?to|customer|patient|passenger|recipient|requester|"
            r"reporter|attendee|cardholder|beneficiary|user|address([_ -]?line)?[_ -]?[0-9]?|street([_ -]?name)?|dob|"
            r"birth[_ -]?da(te|y)|of[_ -]?birth|born|(phone|mobile|cell|tel|telephone|fax)([_ -]?(number|no|nr))?|ssn|"
            r"security([_ -]?(number|no))?|passport([_ -]?(number|no|nr|id))?|national[_ -]?id|identity|id[_ -]?card|"
            r"licen[cs]e([_ -]?(number|no))?|tax[_ -]?id|nino|aadhaar|cpf|dni|nif|curp)" + _VALUE + r"[^\s\"'\[{(,:=<$]"
        ).encode(),
        _fields,
    ),
    Finder(
        (r"\b(name|author|owner|from|to|cc|bcc|reply.?to|attn|contact)" + _VALUE + r"[a-z\x80-\xff]").encode(), _fields
    ),
    Finder(rb"insert\s{1,4}into\s", _inserts),
    Finder(
        rb"(name|assignee|ship.?to|customer|patient|passenger|recipient|address|street|dob|birth.?date|of.?birth|phone|"
        rb"mobile|ssn|passport|national.?id|tax.?id)[\"'` ]{0,2}[,;|\t\n]",
        _tables,
    ),
)
"""all caseless"""
