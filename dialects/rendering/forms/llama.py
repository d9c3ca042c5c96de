"""Llama 3: a reply that is nothing but JSON with a `name` and `parameters`, sometimes behind `<|python_tag|>`."""

from __future__ import annotations

import json

from millrace.dialects.rendering.base import ToolCall
from millrace.dialects.rendering.forms.base import Form, Schemas, json_calls

TAG = "<|python_tag|>"


def read(text: str, schemas: Schemas) -> list[ToolCall]:
    """The calls of a reply, of tools that are offered: any other JSON is an answer. Several stand behind each other,
    with semicolons or white space between them."""
    text = text.strip().removeprefix(TAG).strip()
    decoder, at, calls = json.JSONDecoder(), 0, list[ToolCall]()
    while at < len(text):
        _, end = decoder.raw_decode(text, at)
        calls += json_calls(text[at:end])
        rest = text[end:].lstrip("; \n\t\r")
        at = len(text) - len(rest)
    if not calls or any(one.name not in schemas for one in calls):
        raise ValueError("a call is of a tool that is offered")
    return calls


def begins(text: str) -> bool | None:
    """Whether a reply begins an object."""
    text = text.lstrip()
    return text.startswith(("{", TAG)) if text else None


LLAMA = Form("llama", read, bare=begins, tokens=("<|eot_id|>",))
