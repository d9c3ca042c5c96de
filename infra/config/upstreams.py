"""Servers of others behind the gateway: `[gateway.upstreams]`, and which models they answer: `[[gateway.routes]]`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from millrace.infra.config.base import Section

Api = Annotated[str, Field(pattern=r"^[a-z]+$")]
"""the name of one; which there are the gateway knows"""
RESERVED_NAME = "upstream_url"
"""how rules name the upstream of that setting"""
NotNegative = Annotated[float, Field(ge=0)]


def check_bare(url: str) -> str:
    """A url without a user or a password. Raises ValueError for another: records and the log name it."""
    if "@" in (url.partition("://")[2] or url).partition("/")[0]:
        raise ValueError(
            "has a user or a password before an @, and records and logs name the url: leave them out, and give the key "
            "by key_env, or [gateway] upstream_key"
        )
    return url


HEADER = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,256}")
WITHHELD = frozenset(
    (
        *("accept", "accept-encoding", "connection", "content-encoding", "content-length", "content-type", "date"),
        *("expect", "forwarded", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "via"),
        *("idempotency-key", "origin", "referer"),
    )
)
"""headers that are between two servers, or that the gateway writes itself"""
WITHHELD_FAMILIES = ("x-millrace-", "x-forwarded-", "proxy-", "sec-")
SECRETS = frozenset(
    (
        *("key", "apikey", "token", "secret", "auth", "authorization", "password", "credential", "credentials"),
        *("cookie", "cookie2", "jwt", "signature"),
    )
)
"""words in the name of a header that says who its sender is"""


def passable(name: str) -> str:
    """The name of a header that may go on to an upstream. Raises ValueError for another."""
    name = name.lower()
    if not HEADER.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a header")
    if SECRETS & set(re.split(r"[-_.]", name)):
        raise ValueError(
            f"{name} would give what proves a caller to an upstream (a key, a cookie): headers that may hold "
            "such a thing never go on; key_env gives the upstream its own key"
        )
    if name in WITHHELD or name.startswith(WITHHELD_FAMILIES):
        raise ValueError(f"{name} is between a client and its next server, or written by the gateway: it never goes on")
    return name


Address = Annotated[str, AfterValidator(check_bare)]


class GatewayUpstream(Section):
    """One server that gives text and no token ids."""

    url: Annotated[Address, Field(pattern=r"^https?://[^?#\s]+$")]
    """with the version in its path, as https://api.openai.com/v1"""
    speaks: Annotated[tuple[Api, ...], Field(min_length=1)] = ("chat",)
    """its APIs: chat (/chat/completions), messages (/messages), responses (/responses), completions (/completions),
    embeddings (/embeddings)"""
    key_env: str = ""
    """the environment variable of the gateway that holds its key; empty: it asks for none"""
    key_header: Literal["authorization", "x-api-key", "api-key"] = "authorization"
    """the header that takes the key; authorization: as a bearer"""
    retries: Annotated[int, Field(ge=0, le=10)] = 0
    """how often a call is sent again that it did not answer, or answered with 408, 409, 429 or 5xx"""
    fallback: str = ""
    """the upstream that is asked where this one and its retries fail so"""
    shape: Literal["openai", "azure"] = "openai"
    """of its urls; azure: /deployments/MODEL/chat/completions, below a url that ends with /openai"""
    api_version: str = Field(default="", pattern=r"^[A-Za-z0-9._-]*$")
    """the api-version in the query of each request, as Azure wants it; empty: none"""
    pass_headers: tuple[Annotated[str, AfterValidator(passable)], ...] = ()
    """headers of requests that go on to it, beside those that always do"""

    @model_validator(mode="after")
    def _check(self) -> GatewayUpstream:
        if self.shape == "azure" and not self.api_version:
            raise ValueError('shape = "azure" needs an api_version, as 2024-10-21: Azure refuses requests without one')
        return self


class GatewayPrices(Section):
    """What a million tokens cost, in the one currency of all routes."""

    prompt: NotNegative
    completion: NotNegative
    cached: NotNegative | None = None
    """tokens of a prompt that were read from a cache; None: as all others"""


class GatewayRoute(Section):
    """Models, and who answers them."""

    model: Annotated[str, Field(min_length=1)]
    """the name; each * in it stands for any text"""
    upstream: str
    send_as: str = ""
    """the name that the upstream is asked for; empty: the request goes on byte for byte"""
    prices: GatewayPrices | None = None


def route_fault(upstreams: Mapping[str, GatewayUpstream], routes: Sequence[GatewayRoute]) -> str | None:
    """What is wrong with them together; None when all is well."""
    for at, route in enumerate(routes):
        if route.upstream not in upstreams:
            return f"[[gateway.routes]] {at} ({route.model!r}): {_unknown(route.upstream, upstreams)}"
    for name, upstream in upstreams.items():
        if name == RESERVED_NAME:
            return f"[gateway.upstreams.{name}] is the name of [gateway] upstream_url: choose another"
        if upstream.fallback and upstream.fallback not in upstreams:
            return f"[gateway.upstreams.{name}] fallback: {_unknown(upstream.fallback, upstreams)}"
        chain, behind = [name], upstream.fallback
        while behind and behind in upstreams:
            if behind in chain:
                return f"[gateway.upstreams.{name}] fallback: {' -> '.join([*chain, behind])} is a circle"
            chain.append(behind)
            behind = upstreams[behind].fallback
    return None


def _unknown(name: str, upstreams: Mapping[str, GatewayUpstream]) -> str:
    names = ", ".join(sorted(upstreams)) or "none"
    return f"{name!r} is none of [gateway.upstreams], which has {names}"
