"""The gateway's routes as an OpenAPI document, docs/openapi.json: made from its route table and the types of bodies.

    .venv/bin/python -m tests.docs.openapi

Answers of a dialect are those of its API, and are described by what every one has. Invariant: a route that is described
nowhere here is a KeyError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from millrace.dialects.all import DIALECTS
from millrace.dialects.chat.request import ChatRequest
from millrace.dialects.completions.dialect import CompletionsRequest
from millrace.dialects.messages.request import CountRequest, MessagesRequest
from millrace.dialects.responses.request import ResponsesRequest
from millrace.producers.gateway.app import routes
from millrace.producers.gateway.episodes.bodies import EndIn, EventsIn, FeedbackIn, RewardIn, StartIn

FILE = Path(__file__).parents[2] / "docs" / "openapi.json"
SAID = {
    "chat": "A chat completion as OpenAI's, plain or streamed; what is refused stands in docs/apis.md",
    "completions": "A legacy completion as OpenAI's, plain or streamed; what is refused stands in docs/apis.md",
    "messages": "A message as Anthropic's, plain or streamed; what is refused stands in docs/apis.md",
    "responses": "A response as OpenAI's, plain or streamed; what is refused stands in docs/apis.md",
    "response": "A stored response, as it was answered",
    "delete_response": "A stored response can be named no more",
    "input_items": "The items that a stored response was asked with, in pages",
    "count_tokens": "How many tokens the prompt of a message has",
    "embeddings": "Embeddings as OpenAI's, by an upstream: request and answer pass unaltered",
    "models": "The policies that this gateway serves, their versions, and models of upstreams",
    "model": "One of them, by its name",
    "health": "Whether events are taken and an engine is known; more of it, of its own tenant, to who has a key",
    "start": "Begin an episode",
    "sessions": "The episodes that clients gave a name (`?name=`), the newest last",
    "reward": "Judge an episode, or one reply of it",
    "events": "Say what the agent did and saw beyond its calls",
    "end": "The episode is over",
    "feedback": "What a user says of a reply, or of a session",
}


class EmbeddingsRequest(msgspec.Struct):
    """What OpenAI's clients send. The gateway reads who is asked for, and for whom; all of it passes."""

    model: str
    input: str | list[Any]
    dimensions: int | None = None
    encoding_format: str | None = None
    user: str | None = None


NAMED = dict.fromkeys(("response", "delete_response", "input_items"), "The response") | {"model": "The model"}
"""what the id in a path names, where it is no session"""
BODIES: dict[str, type[msgspec.Struct]] = {
    "chat": ChatRequest,
    "completions": CompletionsRequest,
    "messages": MessagesRequest,
    "responses": ResponsesRequest,
    "count_tokens": CountRequest,
    "embeddings": EmbeddingsRequest,
    "start": StartIn,
    "reward": RewardIn,
    "events": EventsIn,
    "end": EndIn,
    "feedback": FeedbackIn,
}
TEXT: dict[str, Any] = {"type": "string"}
OBJECT: dict[str, Any] = {"type": "object"}


def an_object(**fields: dict[str, Any]) -> dict[str, Any]:
    """An object that has these fields."""
    return {"type": "object", "properties": fields, "required": list(fields)}


ANSWERS: dict[str, dict[str, Any]] = {
    "chat": an_object(id=TEXT, object=TEXT, created={"type": "integer"}, model=TEXT, choices={"type": "array"}),
    "completions": an_object(id=TEXT, object=TEXT, created={"type": "integer"}, model=TEXT, choices={"type": "array"}),
    "messages": an_object(id=TEXT, type=TEXT, role=TEXT, model=TEXT, content={"type": "array"}, usage=OBJECT),
    "responses": an_object(id=TEXT, object=TEXT, status=TEXT, model=TEXT, output={"type": "array"}),
    "response": an_object(id=TEXT, object=TEXT, status=TEXT, model=TEXT, output={"type": "array"}),
    "delete_response": an_object(id=TEXT, object=TEXT, deleted={"const": True}),
    "input_items": an_object(
        object=TEXT,
        data={"type": "array", "items": OBJECT},
        first_id={"type": ["string", "null"]},
        last_id={"type": ["string", "null"]},
        has_more={"type": "boolean"},
    ),
    "count_tokens": an_object(input_tokens={"type": "integer"}),
    "embeddings": an_object(object=TEXT, model=TEXT, data={"type": "array"}),
    "models": an_object(object=TEXT, data={"type": "array", "items": OBJECT}),
    "model": an_object(id=TEXT, object=TEXT, created={"type": "integer"}, owned_by=TEXT),
    "health": an_object(status={"enum": ["ok", "partial", "no engine", "capture down"]}),
    "start": an_object(session=TEXT, api_key=TEXT, base_url=TEXT),
    "sessions": an_object(sessions={"type": "array", "items": an_object(session=TEXT, live={"type": "boolean"})}),
    "reward": an_object(reward_id=TEXT),
    "events": an_object(ids={"type": "array", "items": {"type": ["string", "null"]}}),
    "end": an_object(session=TEXT, ended={"const": True}),
    "feedback": an_object(reward_id=TEXT, session=TEXT),
}
ERROR = an_object(
    error=an_object(
        message=TEXT,
        type={"type": "string"},
        param={"type": ["string", "null"]},
        code={"type": ["string", "null"]},
    )
)
MESSAGES_ERROR = an_object(type={"const": "error"}, error=an_object(type=TEXT, message=TEXT))
OF_MESSAGES = ("messages", "count_tokens")
"""routes whose errors have Anthropic's shape"""
HEADERS = {
    "x-millrace-session": "The name of an episode that a static key's calls belong to",
    "x-session-id": "The same, where the other is missing",
    "x-claude-code-session-id": "The same, where both are missing: Claude Code sends it",
    "session-id": "The same, where all before are missing: Codex sends it",
    "thread-id": "The same, where `session-id` is missing",
    "x-millrace-user": "The end user of a nameless or named call; else `user` or `safety_identifier` of the body",
}
PAGES = {
    "limit": "Items of a page, 1 to 100; 20 where it is not said",
    "order": "`desc`, the newest first, or `asc`",
    "after": "The id of the item behind which the page begins",
}
REFUSALS = {
    "default": "anything else that is no success",
    "400": "malformed, unsupported, or beyond a limit",
    "401": "no key, or a wrong one",
    "403": "another's session, or one that has ended",
    "404": "no such session, response or item here",
    "408": "a body that did not come",
    "409": "a name that is that of several",
    "413": "too large",
    "429": "too much at once, here or in the engine: see retry-after",
    "502": "the engine is gone or broke off",
    "503": "no calls are taken now: see retry-after",
    "504": "the engine is silent",
}
BODY = ("400", "401", "403", "408", "413", "429")
REFUSED_OF = {
    "chat": (*BODY, "502", "503", "504"),
    "completions": (*BODY, "502", "503", "504"),
    "messages": (*BODY, "502", "503", "504"),
    "responses": (*BODY, "404", "502", "503", "504"),
    "count_tokens": (*BODY, "503"),
    "embeddings": (*BODY, "404", "502", "503", "504"),
    "response": ("400", "401", "403", "404", "502", "503", "504"),
    "delete_response": ("401", "403", "404", "502", "503", "504"),
    "input_items": ("400", "401", "403", "404", "502", "503", "504"),
    "models": ("401",),
    "model": ("401", "404"),
    "health": ("503",),
    "start": (*BODY, "503"),
    "sessions": ("400", "401", "403"),
    "reward": (*BODY, "404"),
    "events": (*BODY, "404"),
    "end": (*BODY, "404"),
    "feedback": (*BODY, "404", "409"),
}


def document() -> dict[str, Any]:
    """The whole description."""
    _, schemas = msgspec.json.schema_components(BODIES.values(), ref_template="#/components/schemas/{name}")
    paths: dict[str, dict[str, Any]] = {}
    for route, method, name in routes():
        path = route.replace(":path", "")
        paths.setdefault(path, {})[method.lower()] = operation(path, name)
    return {
        "openapi": "3.1.0",
        "info": {"title": "The gateway of Millrace", "version": "1", "license": {"name": "Apache-2.0"}},
        "security": [{"key": []}, {}],
        "paths": paths,
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {**schemas, "Error": ERROR, "MessagesError": MESSAGES_ERROR},
            "responses": {
                status: {"description": said, **content(ref("schemas", "Error"))} for status, said in REFUSALS.items()
            },
        },
    }


def operation(path: str, name: str) -> dict[str, Any]:
    """What one route takes and answers."""
    made: dict[str, Any] = {"operationId": name, "summary": SAID[name]}
    taken = [at("id", "path", NAMED.get(name, "The session"))] if "{id}" in path else []
    spoken = name in {dialect.name for dialect in DIALECTS}
    if spoken:
        taken += [at(header, "header", said) for header, said in HEADERS.items()]
    if name == "sessions":
        taken.append({**at("name", "query", "The name"), "required": True})
    if name == "input_items":
        taken += [{**at(field, "query", said), "required": False} for field, said in PAGES.items()]
    if taken:
        made["parameters"] = taken
    if name in BODIES:
        made["requestBody"] = {
            "required": spoken or name in ("count_tokens", "embeddings"),
            **content(ref("schemas", BODIES[name].__name__)),
        }
    good = {"description": SAID[name], **content(ANSWERS[name])}
    if spoken:
        good["content"]["text/event-stream"] = {"schema": TEXT}
    refused = ("default", *REFUSED_OF.get(name, ()))
    made["responses"] = {"200": good, **{status: refusal(name, status) for status in refused}}
    return made


def refusal(name: str, status: str) -> dict[str, Any]:
    """What a route answers where it refuses, in the shape of its API."""
    if name not in OF_MESSAGES:
        return ref("responses", status)
    return {"description": REFUSALS[status], **content(ref("schemas", "MessagesError"))}


def at(name: str, place: str, said: str) -> dict[str, Any]:
    """One parameter of a route."""
    return {"name": name, "in": place, "description": said, "required": place == "path", "schema": TEXT}


def content(schema: dict[str, Any]) -> dict[str, Any]:
    """A JSON body of that form."""
    return {"content": {"application/json": {"schema": schema}}}


def ref(part: str, name: str) -> dict[str, Any]:
    """A reference to a component."""
    return {"$ref": f"#/components/{part}/{name}"}


def text() -> str:
    """The file."""
    return json.dumps(document(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
