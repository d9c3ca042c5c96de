"""Model calls as they lie in a log, each with its whole request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from millrace.schemas import codec
from millrace.schemas.requests import RequestStore


class Recorded:
    """The bodies of the events of a log, in its order."""

    def __init__(self) -> None:
        self._stores: dict[str, RequestStore] = {}

    def body(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """The body of the next event; a model call's with its whole request."""
        body: dict[str, Any] = dict(codec.decode_body(event["kind"], event["body"]))
        if event["kind"] != "model_call":
            return body
        request = self._stores.setdefault(event["trajectory"], RequestStore()).add(event["id"], body)
        assert request is not None, "what a request goes on from is in the log"
        return {**body, "request": request, "request_base": None, "request_kept": {}}


def recorded_calls(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The bodies of the model calls among some events."""
    recorded = Recorded()
    return [recorded.body(event) for event in events if event["kind"] == "model_call"]
