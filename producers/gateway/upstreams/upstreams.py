"""The upstreams of a gateway, by name, and the rules that choose among them.

Invariant: a key comes from the environment of the gateway and goes to the upstream that it belongs to alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from millrace.dialects import all as dialects
from millrace.dialects.stored_responses import Recaller, no_recall
from millrace.dialects.translation.all import translator
from millrace.dialects.translation.interpreter import Interpreter
from millrace.infra.config import Settings
from millrace.infra.config.upstreams import RESERVED_NAME, GatewayUpstream
from millrace.infra.engines.azure import AzureUpstream
from millrace.infra.engines.upstream import TextServer, TextUpstream
from millrace.infra.errors import ConfigError
from millrace.producers.gateway.prices import to_prices
from millrace.producers.gateway.upstreams import embeddings
from millrace.producers.gateway.upstreams.attempts import FIRST_S
from millrace.producers.gateway.upstreams.routes import RouteRule, api_refusal, chain, choose, exact

ONE = RESERVED_NAME
"""the name of the single one that needs none, which records call openai"""


@dataclass(frozen=True, slots=True, eq=False)
class Upstream:
    """One of them. `speaks`: names of dialects, and `embeddings`."""

    name: str
    client: TextServer
    speaks: frozenset[str]
    retries: int = 0
    fallback: str = ""
    passes: tuple[str, ...] = ()
    """headers of a request that go on to it, beside those that always do"""

    def headers_of(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Those of `passes` that a request has, as they came."""
        texts = {name: text for name in self.passes if (text := headers.get(name)) is not None}
        return {name: value for name, text in texts.items() if (value := as_came(text)) is not None}

    def keeps(self, dialect: str) -> bool:
        """Whether what it answers in a dialect is its own, ids and all: nothing is translated."""
        return dialect in self.speaks

    @property
    def engine(self) -> str:
        """What records say of who answered."""
        return "openai" if self.name == ONE else self.name


class Upstreams:
    """`whole`: one of the rules takes what no other does, and there is no engine. `first_s`: wait before a first
    retry, in seconds."""

    def __init__(
        self,
        upstreams: Sequence[Upstream],
        rules: Sequence[RouteRule],
        *,
        answers_all: bool = False,
        first_s: float = FIRST_S,
    ) -> None:
        self.rules = list(rules)
        self.answers_all = answers_all
        self.first_s = first_s
        self._named = {upstream.name: upstream for upstream in upstreams}
        self._fallbacks = {upstream.name: upstream.fallback for upstream in upstreams}

    @classmethod
    def one(cls, client: TextUpstream) -> Upstreams:
        """A single one, of chat completions, in place of the engines."""
        return cls([Upstream(ONE, client, frozenset({"chat"}))], [RouteRule("*", ONE)], answers_all=True)

    def route(self, policies: Collection[str], model: str, dialect: str) -> RouteRule | None:
        """`routes.choose`. Raises ApiError 404."""
        engine_policies = None if self.answers_all else policies
        return choose(self.rules, self._speaks, engine_policies, model, dialect, reaches=self._reaches)

    def chain(self, rule: RouteRule, dialect: str, recall: Recaller = no_recall) -> list[Upstream]:
        """Who is asked for a call, in order: at least one. Who speaks another API than `dialect` answers in it all the
        same, with what its caller may name of earlier responses (`recall`) in its place."""
        names = chain(rule.upstream, self._fallbacks, lambda name: self._reaches(name, dialect))
        return [self._answering(self._named[name], dialect, recall) for name in names]

    def chain_of(self, rule: RouteRule, api: str) -> list[Upstream]:
        """The same for what is no call of a model, which is never translated. Raises ApiError 404 where nobody among
        them speaks the API."""
        names = chain(rule.upstream, self._fallbacks, lambda name: self._speaks(name, api))
        if not names:
            raise api_refusal(rule.model, [rule.upstream], api)
        return [self._named[name] for name in names]

    def of_name(self, name: str) -> Upstream | None:
        """The upstream of that name, as it is."""
        return self._named.get(name)

    def _speaks(self, name: str, dialect: str) -> bool:
        return dialect in self._named[name].speaks

    def _reaches(self, name: str, dialect: str) -> bool:
        return self._speaks(name, dialect) or translator(self._named[name].speaks, dialect) is not None

    def _answering(self, upstream: Upstream, dialect: str, recall: Recaller) -> Upstream:
        if dialect in upstream.speaks:
            return upstream
        to = translator(upstream.speaks, dialect)
        assert to is not None
        return replace(upstream, client=Interpreter(upstream.client, to, dialects.by_name(dialect), recall))

    @property
    def models(self) -> list[str]:
        """Those that rules name in full."""
        return exact(self.rules)

    async def close(self) -> None:
        """Let go of every connection. Idempotent."""
        for upstream in self._named.values():
            await upstream.client.close()


def make(settings: Settings, environment: Mapping[str, str]) -> Upstreams | None:
    """Those that the settings name, `upstream_url` last; None where they name none. Made inside the event loop that
    uses them. Raises ConfigError for a key that the environment lacks, or that no header can hold."""
    gateway = settings.gateway
    check_apis(settings)
    keys = {name: _key(name, entry.key_env, environment) for name, entry in gateway.upstreams.items()}
    upstreams = [
        Upstream(
            name,
            _client(entry, keys[name]),
            frozenset(entry.speaks),
            entry.retries,
            entry.fallback,
            entry.pass_headers,
        )
        for name, entry in gateway.upstreams.items()
    ]
    rules = [RouteRule(route.model, route.upstream, route.send_as, to_prices(route.prices)) for route in gateway.routes]
    if gateway.upstream_url:
        key = _fit(gateway.upstream_key.get_secret_value(), "[gateway] upstream_key")
        one = TextUpstream(gateway.upstream_url, key)
        upstreams.append(Upstream(ONE, one, frozenset({"chat"})))
        rules.append(RouteRule("*", ONE))
    return Upstreams(upstreams, rules, answers_all=bool(gateway.upstream_url)) if rules else None


def _client(entry: GatewayUpstream, key: str) -> TextUpstream:
    if not entry.api_version:
        return TextUpstream(entry.url, key, key_header=entry.key_header)
    deployments = entry.shape == "azure"
    return AzureUpstream(entry.url, key, entry.api_version, deployments=deployments, key_header=entry.key_header)


def as_came(text: str) -> str | None:
    """A header's value, which servers give a character for each byte, as clients send it; None for bytes that are no
    UTF-8, which they cannot send."""
    try:
        return text.encode("latin-1").decode()
    except UnicodeError:
        return None


def _key(name: str, variable: str, environment: Mapping[str, str]) -> str:
    if not variable:
        return ""
    key = _fit(environment.get(variable, ""), f"[gateway.upstreams.{name}] key_env: {variable}")
    if not key:
        raise ConfigError(
            f"[gateway.upstreams.{name}] key_env: {variable} is not in the environment of the gateway: export it "
            "before `millrace up`, or leave key_env out for an upstream that asks for no key"
        )
    return key


def check_apis(settings: Settings) -> None:
    """Raises ConfigError for an upstream that is said to speak an API that there is not."""
    apis = sorted([*(dialect.name for dialect in dialects.DIALECTS), embeddings.NAME])
    for name, upstream in settings.gateway.upstreams.items():
        for api in upstream.speaks:
            if api not in apis:
                raise ConfigError(f"[gateway.upstreams.{name}] speaks: {api!r} is none of the APIs {', '.join(apis)}")


def _fit(key: str, where: str) -> str:
    """A key as a header holds it, without the space around it, which files leave there."""
    key = key.strip()
    if not key.isascii() or not key.isprintable():
        raise ConfigError(
            f"{where} holds a character that no key has (a control character, or none of ASCII): set it anew"
        )
    return key
