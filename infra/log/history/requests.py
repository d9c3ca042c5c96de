"""The requests of a trajectory's calls, whole: what a record left out, since an earlier one says it, is put in again.

Invariant: a call whose request the given calls do not say whole keeps its `request_base`, so that nobody takes a part
of a conversation for all of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from millrace.infra.log.history.rows import Row
from millrace.schemas.records import Event, ModelCall
from millrace.schemas.requests import RequestStore


class WholeRequests:
    """Of the model calls of any trajectories, each behind those that it goes on from."""

    def __init__(self) -> None:
        self._stores: dict[str, RequestStore] = {}

    def add(self, event: Row[Event]) -> None:
        """Take a call. Raises SchemaError for one whose body cannot be read."""
        self._store(event).add(event["id"], event.body)

    def resolve(self, event: Row[Event]) -> ModelCall:
        """A call with its whole request, as it is where that is not known. Raises SchemaError like `add`."""
        body: ModelCall = event.body
        request = self._store(event).add(event["id"], body)
        if request is None or body["request_base"] is None:
            return body
        return cast(ModelCall, {**body, "request": request, "request_base": None, "request_kept": {}})

    def _store(self, event: Row[Event]) -> RequestStore:
        return self._stores.setdefault(event["trajectory"], RequestStore())


def whole_calls(calls: Iterable[Row[Event]]) -> list[ModelCall]:
    """The bodies of model calls, each with its whole request where these calls say it. Raises SchemaError for a body
    that cannot be read."""
    events, requests = list(calls), WholeRequests()
    for call in events:
        requests.add(call)
    return [requests.resolve(call) for call in events]
