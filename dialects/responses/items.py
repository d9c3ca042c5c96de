"""The items that a stored response was asked with, in pages as OpenAI gives them.

Invariants: each item of a response has an id of its own, the same whenever it is asked for; whoever goes from page to
page behind the last item gets every item once, in either order. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millrace.dialects.errors import bad_request
from millrace.schemas.json_values import Json, JsonObject

Item = JsonObject
MOST, USUAL = 100, 20
"""items of a page: at most, and where it is not said"""
PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


def page(items: Sequence[Item], response: str, query: Mapping[str, str]) -> JsonObject:
    """One page of the items, the newest first unless the query says otherwise. Raises ApiError 400."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_request(f"order: asc or desc, not {order!r}", param="order")
    found = identified(items, response)
    if order == "desc":
        found.reverse()
    start = 0
    if (after := query.get("after")) is not None:
        start = next((at for at, item in enumerate(found, 1) if item["id"] == after), 0)
        if not start:
            raise bad_request(f"after: no item of response '{response}' has the id {after!r}", param="after")
    end = start + _limit(query.get("limit"))
    shown = found[start:end]
    first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return {"object": "list", "data": shown, "first_id": first, "last_id": last, "has_more": end < len(found)}


def _limit(given: str | None) -> int:
    if given is None:
        return USUAL
    limit = int(given) if given.isascii() and given.isdecimal() and len(given) < 9 else 0
    if not 1 <= limit <= MOST:
        raise bad_request(f"limit: a number from 1 to {MOST}, not {given[:20]!r}", param="limit")
    return limit


def identified(items: Sequence[Item], response: str) -> list[Item]:
    """The items as OpenAI shows them: typed, each with an id and with its content in parts."""
    out: list[Item] = []
    known: set[str] = set()
    for at, item in enumerate(items):
        kind = item.get("type") or "message"
        id = item.get("id")
        if not isinstance(id, str) or not id or id in known:
            made = response.removeprefix("resp_")
            id = f"{PREFIXES.get(str(kind), 'item')}_{made}_in{at}"
            while id in known:
                id += "_"
        known.add(id)
        shown = {**item, "id": id, "type": kind}
        if kind == "message":
            shown["content"] = _parts(item.get("content"), item.get("role"))
            shown.setdefault("status", "completed")
        out.append(shown)
    return out


def _parts(content: Json, role: object) -> Json:
    if not isinstance(content, str):
        return content
    if role == "assistant":
        return [{"type": "output_text", "text": content, "annotations": []}]
    return [{"type": "input_text", "text": content}]
