"""What an HTTP request asks for, in the words of ClickHouse's HTTP interface. Pure.

Invariants: a request that a browser sends for another page, or to a name that is not this machine's loopback, is
refused before its key is looked at; what a packed body unpacks to is bounded."""

from __future__ import annotations

import base64
import binascii
import hmac
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

from millrace.consumers.warehouse.endpoint.encoding import choose
from millrace.consumers.warehouse.endpoint.faults import (
    ACCESS_DENIED,
    AUTHENTICATION_FAILED,
    BAD_ARGUMENTS,
    NOT_IMPLEMENTED,
    REQUIRED_PASSWORD,
    TOO_LARGE,
    QueryError,
)
from millrace.consumers.warehouse.endpoint.query import DEFAULT_FORMAT, Query
from millrace.infra.config import is_local
from millrace.infra.principals.book import ADVICE, ALL_TENANTS, KEY
from millrace.infra.principals.watch import PrincipalWatch

READING_ROLES = frozenset({"owner", "operator", "auditor", "reader"})
LONGEST = 256 << 10
"""bytes of a query, as the engine's parser has it"""
USERS = ("millrace", "default")
_PARAMETERS = frozenset(
    (
        *("query", "database", "default_format", "query_id", "user", "password"),
        *("compress", "decompress", "client_protocol_version"),
    )
)


class QueryRequest(NamedTuple):
    """A query and how its answer is to come. encoding: of the answer's bytes, empty for none."""

    query: Query
    query_id: str
    encoding: str


@dataclass(frozen=True, slots=True)
class AccessKey:
    """The word that a request must bring, or a key of `principals` whose roles let it read; empty where none is asked
    for."""

    word: str
    principals: PrincipalWatch | None = None

    def check(self, headers: Mapping[str, str], query: Mapping[str, str]) -> None:
        """Raises QueryError unless the request brings it."""
        user, password = _credentials(headers, query)
        if not self.word:
            return
        if not password:
            raise QueryError(
                "a key is asked for: user millrace, password from the file keys/warehouse under [home] "
                "(`millrace sql` finds it by itself).",
                REQUIRED_PASSWORD,
            )
        if self.principals is not None and KEY.fullmatch(password):
            _check_principal(self.principals, password)
            return
        is_same = hmac.compare_digest(password.encode(), self.word.encode())
        if not is_same or user not in USERS:
            raise QueryError(
                f"{user}: Authentication failed: the user is millrace, and the password the word in keys/warehouse "
                "under [home].",
                AUTHENTICATION_FAILED,
            )


def _check_principal(principals: PrincipalWatch, key: str) -> None:
    """Raises QueryError for a key that is not live, or that may not read rows of every tenant."""
    if not principals.is_trusted:
        message = "the log does not tell whose this key is: its brokers do not answer. Try again."
        raise QueryError(message, AUTHENTICATION_FAILED)
    standing, grant = principals.verify(key)
    if standing != "live" or grant is None:
        raise QueryError(f"Authentication failed: {ADVICE[standing]}.", AUTHENTICATION_FAILED)
    roles = READING_ROLES.intersection(grant["roles"])
    if not roles:
        needed = ", ".join(sorted(READING_ROLES))
        raise QueryError(f"the roles of this key do not let it read the warehouse: it takes {needed}.", ACCESS_DENIED)
    if "owner" not in roles and grant["tenant"] != ALL_TENANTS:
        raise QueryError(
            "the warehouse does not tell tenants apart yet, so it takes keys of the tenant * or of the role owner.",
            ACCESS_DENIED,
        )


def check_caller(headers: Mapping[str, str]) -> None:
    """Raises QueryError for a request that names another host, or that a browser sends for another page."""
    try:
        host = urlsplit(f"//{headers.get('host', '')}").hostname or ""
        origin = headers.get("origin")
        site = urlsplit(origin).netloc if origin else None
    except ValueError:
        raise QueryError("the Host or Origin of the request is no address.", BAD_ARGUMENTS) from None
    if not is_local(host):
        raise QueryError(f"the endpoint is for this machine alone: call it 127.0.0.1, not {host!r}.", ACCESS_DENIED)
    is_foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
    if is_foreign or (site is not None and site != headers.get("host")):
        raise QueryError("pages of other sites may not ask here.", ACCESS_DENIED)


def read_request(items: Iterable[tuple[str, str]], headers: Mapping[str, str], body: bytes) -> QueryRequest:
    """The query of a request. items: of its URL, in order. Raises QueryError for what cannot be served."""
    query = dict(items)
    if query.get("decompress", "0") != "0":
        raise QueryError("queries in compressed frames are not served: send the text.", NOT_IMPLEMENTED)
    if query.get("compress", "0") not in ("0", "false"):
        raise QueryError(
            "answers in ClickHouse's own compressed frames are not served: set compress=0 (JDBC: at the end of the "
            "URL, ?compress=0), or let the client choose gzip or no compression.",
            NOT_IMPLEMENTED,
        )
    if headers.get("content-type", "").startswith("multipart/"):
        raise QueryError("external tables and forms are not served: send the query as the body.", NOT_IMPLEMENTED)
    text = "\n".join(part for part in (query.get("query", ""), _text(body, headers)) if part)
    if len(text.encode()) > LONGEST:
        raise QueryError(f"the query is longer than {LONGEST} bytes: use fewer literals.", TOO_LARGE)
    params = {name.removeprefix("param_"): value for name, value in query.items() if name.startswith("param_")}
    settings = {
        name: value for name, value in query.items() if name not in _PARAMETERS and not name.startswith("param_")
    }
    form = headers.get("x-clickhouse-format") or query.get("default_format") or DEFAULT_FORMAT
    may_compress = query.get("enable_http_compression", "1") not in ("0", "false")
    return QueryRequest(
        Query(
            text,
            params,
            settings,
            query.get("database") or headers.get("x-clickhouse-database", ""),
            form,
            query.get("wait_end_of_query", "0") not in ("0", "false"),
            _version(query.get("client_protocol_version", "0")),
        ),
        query.get("query_id", "")[:200],
        choose(headers.get("accept-encoding", "")) if may_compress else "",
    )


def unpack_query(body: bytes, headers: Mapping[str, str]) -> bytes:
    """A query's bytes as they were before the client packed them, up to one more than may be. Raises QueryError."""
    how = headers.get("content-encoding", "") or "identity"
    if how == "identity":
        return body
    if how not in ("gzip", "deflate"):
        raise QueryError(f"a query may come as it is, in gzip or in deflate, not in {how}.", NOT_IMPLEMENTED)
    try:
        return zlib.decompressobj(47).decompress(body, LONGEST + 1)
    except zlib.error:
        raise QueryError(f"the body is not {how}.", BAD_ARGUMENTS) from None


def _version(text: str) -> int:
    if not (text.isdecimal() and len(text) < 10):
        raise QueryError(f"client_protocol_version must be a number, not {text!r}.", BAD_ARGUMENTS)
    return int(text)


def _text(body: bytes, headers: Mapping[str, str]) -> str:
    try:
        return unpack_query(body, headers).decode()
    except UnicodeDecodeError:
        raise QueryError("a query is UTF-8.", BAD_ARGUMENTS) from None


def _credentials(headers: Mapping[str, str], query: Mapping[str, str]) -> tuple[str, str]:
    """User and password, from where clients put them."""
    kind, _, token = headers.get("authorization", "").partition(" ")
    if kind.lower() == "basic":
        try:
            user, _, password = base64.b64decode(token, validate=True).decode().partition(":")
            return user, password
        except (binascii.Error, UnicodeDecodeError):
            return "", ""
    if kind.lower() == "bearer":
        return USERS[0], token.strip()
    password = headers.get("x-clickhouse-key") or query.get("password", "")
    return headers.get("x-clickhouse-user") or query.get("user") or USERS[0], password
