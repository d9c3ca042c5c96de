"""No role decodes a record of the log bare: whoever does, says in the same function what becomes of one that is none.

A record of the log may be anybody's bytes. A call of the codec stands inside `try`, with an answer to SchemaError, or
in a function of the table below, with the reason why its bytes decode, or why nobody may go on past them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.house import ROOMS

ROLES = set(ROOMS) - {"schemas", "testing"}
ROOT = Path(__file__).parents[1]
CODEC = "millrace.schemas.codec"
DECODERS = {"decode", "decode_as", "decode_body", "decode_by_name"}
ANSWERS = {"SchemaError", "CorruptRecord", "UnknownSchema", "Exception"}
OWN = "what it was handed is decodable: this process encoded it, or read it with a guard"
CALLER = "it says so in `Raises`, and whoever calls it answers"
STATE = "without it the state, or the chain, is another: nobody may go on past it"
BARE = {
    "consumers/audit/refold.py:difference": OWN,
    "infra/log/history/ledger.py:stored_hash": CALLER,
    "infra/log/history/newest.py:_event_of": OWN,
    "infra/log/history/newest.py:older": OWN,
    "infra/log/history/rows.py:body": CALLER,
    "infra/log/history/rows.py:row_of": CALLER,
    "consumers/scores.py:stored_id": CALLER,
    "consumers/replay/rebuild/spool.py:_encode_with_places": OWN,
    "consumers/replay/rejudge.py:_read": OWN,
    "consumers/warehouse/ingest/table_choice.py:split_event": CALLER,
    "consumers/warehouse/ingest/table_choice.py:rewrite_newest": CALLER,
    "infra/log/blobs.py:behind": CALLER,
    "infra/stages/replay.py:_compare": CALLER,
    "infra/stages/replay.py:turns": STATE,
    "infra/stages/state.py:restore": STATE,
    "producers/gateway/sessions/sessions.py:_refold": CALLER,
}


def test_no_role_decodes_a_record_of_the_log_bare() -> None:
    found = {f"{path.relative_to(ROOT)}:{name}" for room in ROLES for path in (ROOT / room).rglob("*.py")
             for name in bare(ast.parse(path.read_text()))}  # fmt: skip
    assert found - BARE.keys() == set(), "read it with `infra.log.readable.readable`, or answer SchemaError"
    assert BARE.keys() - found == set(), "gone: take it off the table"


def test_a_bare_one_is_found() -> None:
    code = """
from millrace.schemas.codec import decode
def f(record):
    return codec.decode_as("Decision", record.value)
def g(record):
    try:
        pass
    except SchemaError:
        return decode(record.value)
def h(record):
    try:
        return codec.decode(record.value)
    except (SchemaError, ClaimError):
        return None
def i(record):
    with suppress(SchemaError):
        return codec.decode_body("reward", record.value)
def j(data):
    return data.decode("utf-8")
"""
    assert set(bare(ast.parse(code))) == {"f", "g"}


def bare(tree: ast.Module) -> Iterator[str]:
    """Names of functions that call the codec where nothing answers."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    own = {name.asname or name.name for node in imports if node.module == CODEC for name in node.names} & DECODERS
    yield from _bare(tree, own, "", answered=False)


def _bare(node: ast.AST, own: set[str], function: str, *, answered: bool) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        function, answered = getattr(node, "name", function), False
    if isinstance(node, ast.Call) and not answered and _decodes(node.func, own):
        yield function
    guarded = _guarded(node)
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _bare(child, own, function, answered=answered or (guarded and field == "body"))


def _guarded(node: ast.AST) -> bool:
    """Whether a SchemaError of its body is answered."""
    if isinstance(node, ast.Try):
        caught = [name for handler in node.handlers for name in _names(handler.type)]
    elif isinstance(node, ast.With):
        calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
        caught = [
            name for call in calls if "suppress" in _names(call.func) for arg in call.args for name in _names(arg)
        ]
    else:
        return False
    return not ANSWERS.isdisjoint(caught)


def _names(node: ast.AST | None) -> list[str]:
    return [one.id for one in ast.walk(node) if isinstance(one, ast.Name)] if node is not None else []


def _decodes(func: ast.expr, own: set[str]) -> bool:
    if isinstance(func, ast.Attribute):
        return func.attr in DECODERS and isinstance(func.value, ast.Name) and func.value.id == "codec"
    return isinstance(func, ast.Name) and func.id in own
