"""A request of OpenAI's Responses that names what was said before, made whole: `previous_response_id` and items by
their ids become the items themselves.

Invariants: a whole request says what it would have said, had its client sent every item again; so tokens, lineages and
records do not depend on how a conversation is sent. A request to an upstream that names what is not known here stays as
it came, and is never taken for a whole one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from millrace.dialects.errors import ApiError, bad_request
from millrace.dialects.reading.reader import NamedBefore
from millrace.dialects.responses.request import AnyResponses, ResponsesRequest, parse_any
from millrace.dialects.stored_responses import Recall, StoredRequest
from millrace.schemas.json_values import JsonObject

T = TypeVar("T")

_ESCAPES = re.compile(rb"\\u00[4-7]")
"""a letter of a name, as no client writes it"""


def refers(body: bytes) -> bool:
    """Whether a body may name what was said before; what it does name, `names_others` says."""
    return b"previous_response_id" in body or b'"id"' in body or _ESCAPES.search(body) is not None


def names_others(request: AnyResponses) -> bool:
    """Whether a request names a response or an item."""
    items = request.input if isinstance(request.input, list) else ()
    return bool(request.previous_response_id) or any(map(_is_reference, items))


def named_ids(request: AnyResponses) -> list[str]:
    """The response and the items that a request names."""
    items = request.input if isinstance(request.input, list) else ()
    ids = [request.previous_response_id, *(item.get("id") for item in items if _is_reference(item))]
    return [id for id in ids if isinstance(id, str) and id]


def names_of(request: AnyResponses) -> str:
    """All that a request names of what was said before, as one text."""
    items = request.input if isinstance(request.input, list) else ()
    names = [
        request.previous_response_id,
        request.conversation,
        *(item.get("id") for item in items if _is_reference(item)),
    ]
    return repr(names) if any(names) else ""


def _is_reference(item: JsonObject) -> bool:
    """OpenAI lets the type of a reference be left out."""
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "id" in item and "role" not in item)


def expand(request: ResponsesRequest, body: bytes, recall: Recall) -> bytes:
    """The body of a request with every item that it names, and every other field as it came. Raises ApiError in
    OpenAI's shape for what is not known."""
    items: list[bytes] = []
    if request.previous_response_id:
        former_items = recall.conversation(request.previous_response_id)
        if former_items is None:
            raise _no_response(request.previous_response_id)
        items += former_items
    for at, item in enumerate(request_items(request)):
        items.append(_named_item(item, at, recall) if _is_reference(item) else msgspec.json.encode(item))
    return _with_items(body, items)


def for_record(body: bytes, recall: Recall) -> NamedBefore | None:
    """What a request that an upstream gets as it came says, as its record has it: whole where all that it names is
    known. None for one that names nothing, or is none that is read. Raises ApiError for what another caller was
    told."""
    try:
        request = parse_any(body)
    except ApiError:
        return None
    if not names_others(request):
        return None if not request.conversation else NamedBefore(body, whole=False)
    items, is_whole = list[bytes](), not request.conversation
    if before := request.previous_response_id:
        if recall.is_foreign(before):
            raise _no_response(before)
        former_items = _look_up(recall.conversation, before)
        is_whole = former_items is not None and is_whole
        items += former_items or ()
        if former_items is None:
            recall.is_known(before)
    for item in request_items(request):
        if not _is_reference(item):
            items.append(msgspec.json.encode(item))
            continue
        id = item.get("id")
        if isinstance(id, str) and recall.is_foreign(id):
            raise _no_item(id)
        one = _look_up(recall.item, id) if isinstance(id, str) else None
        is_whole = one is not None and is_whole
        items += () if one is None else (one,)
    return NamedBefore(_with_items(body, items) if is_whole else body, recall.used, is_whole)


def _look_up(lookup: Callable[[str], T | None], id: str) -> T | None:
    """What an id names; None also where that is more than a request may hold."""
    try:
        return lookup(id)
    except ApiError:
        return None


def flatten(body: bytes) -> bytes:
    """A whole request for an upstream that answered none of what it named: by its items alone, without the ids that it
    does not know, and without thoughts, which no other model wrote."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    fields.pop("previous_response_id", None)
    items = [
        msgspec.json.encode({name: value for name, value in item.items() if name not in ("id", "status")})
        for item in request_items(parse_any(body))
        if item.get("type") != "reasoning"
    ]
    return _with_items(msgspec.json.encode(fields), items)


def _with_items(body: bytes, items: Sequence[bytes]) -> bytes:
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    input_items = msgspec.Raw(b"[" + b",".join(items) + b"]")
    return msgspec.json.encode({**fields, "input": input_items})


def _named_item(item: JsonObject, at: int, recall: Recall) -> bytes:
    id = item.get("id")
    if not isinstance(id, str):
        raise bad_request(f"input[{at}].id: a text is required", param=f"input[{at}]")
    if (content := recall.item(id)) is None:
        raise _no_item(id)
    return content


def _no_item(id: str) -> ApiError:
    message = (
        f"Item with id '{id}' not found. Items are not persisted when `store` is set to false. Try again with "
        "`store` set to true, or remove this item from your input."
    )
    return ApiError(404, message, param="input")


def _no_response(id: str) -> ApiError:
    message = f"Previous response with id '{id}' not found."
    return bad_request(message, param="previous_response_id", code="previous_response_not_found")


def request_items(request: AnyResponses) -> list[JsonObject]:
    """The items of a request; a text is one."""
    if isinstance(request.input, str):
        return [{"type": "message", "role": "user", "content": request.input}]
    return request.input


def to_store(request: AnyResponses) -> StoredRequest | None:
    """What is kept of a whole request; None where its response is not to be stored."""
    if request.store is False:
        return None
    return StoredRequest(
        [msgspec.json.encode(item) for item in request_items(request)], request.previous_response_id or None
    )
