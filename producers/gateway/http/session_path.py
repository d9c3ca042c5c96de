"""A conversation's name in the base_url, for clients that can set nothing else: `/session/NAME/v1/...`.

Invariant: such a request is what it would be at `/v1/...` with the header `x-millrace-session: NAME`, which wins where
it is sent as well; only the log tells them apart."""

from __future__ import annotations

from starlette.types import Scope

from millrace.dialects.errors import bad_request
from millrace.producers.gateway.sessions.ownership import NAME_HEADER, PATH

PREFIX = "/session/"
_HEADER = PATH.encode()


def strip_name(scope: Scope) -> Scope:
    """An HTTP request without a name in its path. Raises ApiError 400 for a name that is none."""
    path: str = scope["path"]
    if not path.startswith(PREFIX):
        return scope
    name, slash, rest = path.removeprefix(PREFIX).partition("/")
    if not name or not name.isprintable():
        raise bad_request(f"{PREFIX}NAME/v1: a name is printable and not empty", param=NAME_HEADER)
    headers = [*scope["headers"], (_HEADER, name.encode())]
    at = slash + rest
    return {**scope, "path": at, "raw_path": at.encode(errors="surrogatepass"), "headers": headers}
