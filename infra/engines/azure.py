"""An upstream whose urls are those of Azure OpenAI: a deployment in the path, a version of the API in the query.

Invariants: what is asked of a deployment is asked of the one that the request's `model` names; the version is the one
of the settings, whatever the client's query says; the body is what it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

import msgspec

from millrace.infra.engines.upstream import NO_HEADERS, StreamedReply, TextUpstream

VERSION = "api-version"
OF_DEPLOYMENT = ("/chat/completions", "/completions", "/embeddings")
"""paths that Azure has below a deployment; all others it has once"""


class _Deployment(msgspec.Struct):
    model: Any = None


_deployment = msgspec.json.Decoder(_Deployment)


class AzureUpstream(TextUpstream):
    """The server at `base_url` (with its /openai), asked in `api_version`. `deployments`: whether its urls name a
    deployment, as all do but those below /openai/v1."""

    def __init__(self, base_url: str, api_key: str, api_version: str, *, deployments: bool, **more: Any) -> None:
        super().__init__(base_url, api_key, **more)
        self._version = api_version
        self._deployments = deployments

    async def _send(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str] = NO_HEADERS
    ) -> StreamedReply:
        return await super()._send(method, self.path_of(path, body), body, headers)

    def path_of(self, path: str, body: bytes | None) -> str:
        """Where a request of OpenAI's path goes."""
        below, _, query = path.partition("?")
        if self._deployments and below in OF_DEPLOYMENT and (name := _model(body)):
            below = f"/deployments/{quote(name, safe='')}{below}"
        if self._version:
            fields = [field for field in parse_qsl(query, keep_blank_values=True) if field[0] != VERSION]
            query = urlencode([*fields, (VERSION, self._version)])
        return f"{below}?{query}" if query else below


def _model(body: bytes | None) -> str:
    """The model that a request names, "" where it names none."""
    try:
        model = None if body is None else _deployment.decode(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return model if isinstance(model, str) else ""
