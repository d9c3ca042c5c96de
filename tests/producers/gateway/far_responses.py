"""An upstream of OpenAI's Responses that keeps its conversations itself, and knows what its model read."""

from __future__ import annotations

import zlib
from typing import Any

import orjson

from millrace.infra.engines.upstream import HttpReply, StreamedReply
from tests.support.in_process import Played, PlayedUpstream

JSON = {"content-type": "application/json"}
STREAM = {"content-type": "text/event-stream"}


class FarResponses:
    """`read`: the items that the model read for each response; `bodies`: the requests as they came; `asked`: methods
    and paths of what was asked of responses."""

    def __init__(self, name: str = "far") -> None:
        self.name = name
        self.kept: dict[str, list[dict[str, Any]]] = {}
        self.items: dict[str, dict[str, Any]] = {}
        self.read: dict[str, list[dict[str, Any]]] = {}
        self.told: dict[str, dict[str, Any]] = {}
        self.bodies: list[bytes] = []
        self.asked: list[str] = []

    def answer(self, path: str, body: bytes, method: str = "POST") -> Played:
        """One request of any kind."""
        if path.partition("?")[0] != "/responses":
            self.asked.append(f"{method} {path}")
            return self._of_response(path.removeprefix("/responses/"), method)
        self.bodies.append(body)
        asked = orjson.loads(body)
        try:
            conversation = self._conversation(asked)
        except KeyError as error:
            return refusal(400, f"Previous response with id {error} not found.")
        response = self._reply(conversation, asked)
        if not asked.get("stream"):
            return Played(parts=[orjson.dumps(response)], headers=JSON)
        return Played(parts=[b"".join(map(_event, _events(response)))], headers=STREAM)

    def _conversation(self, asked: dict[str, Any]) -> list[dict[str, Any]]:
        given = asked["input"]
        new = [{"role": "user", "content": given}] if isinstance(given, str) else given
        before = asked.get("previous_response_id")
        return [
            *(self.kept[before] if before else []),
            *(self.items[item["id"]] if item.get("type") == "item_reference" else item for item in new),
        ]

    def _reply(self, conversation: list[dict[str, Any]], asked: dict[str, Any]) -> dict[str, Any]:
        number, kind = len(self.read), zlib.crc32(orjson.dumps(conversation)) % 4
        text = {"type": "output_text", "text": f"{self.name} says {number}", "annotations": []}
        output: list[dict[str, Any]] = []
        if kind % 2:
            output.append({"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]})
        if kind < 3:
            output.append({"type": "message", "role": "assistant", "content": [text], "status": "completed"})
        if kind > 1:
            output.append({"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": '{"a": 1.0}'})
        output = [{"id": f"it_{self.name}{number}_{at}", **item} for at, item in enumerate(output)]
        id = f"resp_{self.name}{number}"
        self.read[id] = conversation
        if asked.get("store") is not False:
            self.kept[id] = [*conversation, *output]
            self.items |= {item["id"]: item for item in output}
        self.told[id] = {
            "id": id,
            "object": "response",
            "status": "completed",
            "previous_response_id": asked.get("previous_response_id"),
            "output": output,
            "usage": {"input_tokens": 7, "output_tokens": 3},
        }
        return self.told[id]

    def _of_response(self, rest: str, method: str) -> Played:
        """What is asked of a response of the past: it, its items, that it goes."""
        id, _, below = rest.partition("?")[0].partition("/")
        if id not in self.kept:
            return refusal(404, f"Response with id '{id}' not found.")
        if method == "DELETE":
            del self.kept[id]
            gone = {"id": id, "object": "response", "deleted": True}
            return Played(parts=[orjson.dumps(gone)], headers=JSON)
        if below == "input_items":
            said = {"object": "list", "data": self.read[id], "first_id": None, "last_id": None, "has_more": False}
            return Played(parts=[orjson.dumps(said)], headers=JSON)
        return Played(parts=[orjson.dumps(self.told[id])], headers=JSON)


class FarUpstream(PlayedUpstream):
    """The client of `far`."""

    far: FarResponses

    async def _send(self, method: str, path: str, body: bytes | None, headers: Any = None) -> StreamedReply:
        answer: Any = self.far.answer(path, body or b"", method)
        return HttpReply(answer, self.base_url, self._idle_s, self._longest)


def refusal(status: int, said: str) -> Played:
    error = {"message": said, "type": "invalid_request_error", "code": None, "param": None}
    return Played(status=status, parts=[orjson.dumps({"error": error})], headers=JSON)


def _events(response: dict[str, Any]) -> list[dict[str, Any]]:
    begun = {**response, "status": "in_progress", "output": []}
    items = [
        {"type": f"response.output_item.{what}", "output_index": at, "item": item}
        for at, item in enumerate(response["output"])
        for what in ("added", "done")
    ]
    return [
        {"type": "response.created", "response": begun},
        *items,
        {"type": "response.completed", "response": response},
    ]


def _event(event: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), orjson.dumps(event))
