"""The items that a stored response was asked with, in pages as OpenAI gives them.

Invariants: each item of a response has an id of its own, the same whenever it is asked for; whoever goes from page to
page behind the last item gets every item once, in either order. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millrace.dialects.errors import bad_request
from millrace.schemas.json_values import Json, JsonObject

Item = JsonObject
MOST, DEFAULT_LIMIT = 100, 20
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
    all_items = with_ids(items, response)
    if order == "desc":
        all_items.reverse()
    start = 0
    if (after := query.get("after")) is not None:
        start = next((at for at, item in enumerate(all_items, 1) if item["id"] == after), 0)
        if not start:
            raise bad_request(f"after: no item of response '{response}' has the id {after!r}", param="after")
    end = start + _limit(query.get("limit"))
    page_items = all_items[start:end]
    first, last = (page_items[0]["id"], page_items[-1]["id"]) if page_items else (None, None)
    return {"object": "list", "data": page_items, "first_id": first, "last_id": last, "has_more": end < len(all_items)}


def _limit(value: str | None) -> int:
    if value is None:
        return DEFAULT_LIMIT
    limit = int(value) if value.isascii() and value.isdecimal() and len(value) < 9 else 0
    if not 1 <= limit <= MOST:
        raise bad_request(f"limit: a number from 1 to {MOST}, not {value[:20]!r}", param="limit")
    return limit


def with_ids(items: Sequence[Item], response: str) -> list[Item]:
    """The items as OpenAI shows them: typed, each with an id and with its content in parts."""
    out: list[Item] = []
    ids: set[str] = set()
    for at, item in enumerate(items):
        kind = item.get("type") or "message"
        id = item.get("id")
        if not isinstance(id, str) or not id or id in ids:
            base = response.removeprefix("resp_")
            id = f"{PREFIXES.get(str(kind), 'item')}_{base}_in{at}"
            while id in ids:
                id += "_"
        ids.add(id)
        typed_item = {**item, "id": id, "type": kind}
        if kind == "message":
            typed_item["content"] = _parts(item.get("content"), item.get("role"))
            typed_item.setdefault("status", "completed")
        out.append(typed_item)
    return out


def _parts(content: Json, role: object) -> Json:
    if not isinstance(content, str):
        return content
    if role == "assistant":
        return [{"type": "output_text", "text": content, "annotations": []}]
    return [{"type": "input_text", "text": content}]
