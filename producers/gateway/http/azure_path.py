"""Clients of Azure OpenAI: `/openai/deployments/NAME/...` and `/openai/...` are the routes at `/v1/...`.

Invariants: such a request is what it would be at `/v1/...` with the deployment as its model, whatever model its body
names; one that names the same is read byte for byte; a path that is none of Azure's stays as it is."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, urlencode

import msgspec
from starlette.types import Scope

from millrace.dialects.reading.head import rename_model

PREFIX, V1 = "/openai/", "/v1/"
DEPLOYMENTS = "deployments/"
OF_DEPLOYMENT = ("/chat/completions", "/completions", "/embeddings")
"""below a deployment; the first that a path ends with"""
VERSION = "api-version"
"""field of the query that says how Azure is to understand a request: nothing here depends on it"""
DEPLOYMENT = "millrace.deployment"
"""the deployment that a request names in its path, in its scope"""


class _RequestModel(msgspec.Struct):
    model: Any = None


_model_decoder = msgspec.json.Decoder(_RequestModel)


def to_v1(scope: Scope) -> Scope:
    """A request without Azure's path."""
    path: str = scope["path"]
    if not path.startswith(PREFIX):
        return scope
    rest = path.removeprefix(PREFIX)
    if not rest.startswith(DEPLOYMENTS):
        return _at(scope, V1 + rest.removeprefix("v1/"))
    rest = rest.removeprefix(DEPLOYMENTS)
    # As it was sent, where a slash of the name is none of the path's: completions of `a/chat` are no chat of `a`.
    raw_path: bytes = scope.get("raw_path") or path.encode(errors="surrogatepass")
    below = next((one for one in OF_DEPLOYMENT if rest.endswith(one) and raw_path.endswith(one.encode())), None)
    if below is None or rest == below:
        return scope
    return {**_at(scope, V1 + below[1:]), DEPLOYMENT: rest.removesuffix(below)}


def _at(scope: Scope, path: str) -> Scope:
    query: bytes = scope.get("query_string", b"")
    if VERSION.encode() in query:
        fields = parse_qsl(query.decode("latin-1"), keep_blank_values=True, encoding="latin-1")
        query = urlencode([field for field in fields if field[0] != VERSION], encoding="latin-1").encode()
    return {**scope, "path": path, "raw_path": path.encode(errors="surrogatepass"), "query_string": query}


def name_model(body: bytes, name: str) -> bytes:
    """A request to a deployment, as one for the model of that name. Raises ApiError 400 for what is no JSON object."""
    try:
        if _model_decoder.decode(body).model == name:
            return body
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass  # `renamed` says what is wrong with it
    return rename_model(body, name)
