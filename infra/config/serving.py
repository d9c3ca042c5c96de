"""What answers agents: `[gateway]`, `[engine]`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, SecretStr

from millrace.infra.config.base import Name, Positive, Seconds, Section
from millrace.infra.config.upstreams import Address, GatewayPrices, GatewayRoute, GatewayUpstream
from millrace.infra.engines.kind import Device
from millrace.infra.engines.kinds import KindName
from millrace.schemas.json_values import Json


def _hermes(form: object) -> Json:
    """Raises ValueError for any other form, with the way that remains."""
    if form != "hermes":
        raise ValueError(
            f"only hermes is supported, not {form!r}: leave it out: the form of calls (llama, mistral, pythonic, "
            "...) is found from the model's chat template or its [gateway] renderer"
        )
    return form


class GatewayKey(Section):
    """One static key of the gateway."""

    key: Annotated[SecretStr, Field(min_length=1)]
    tenant: Name = "local"
    """the key that `[rollout] key` names is the tenant `rollouts` unless this says otherwise"""
    judges: tuple[str, ...] = ()
    """verifiers of the deployment (of `[policy] awaits` and `[reward] source`) that it may speak for"""
    max_in_flight: Positive | None = None
    """most requests of it at once, besides the bound of its tenant"""
    max_rate: Seconds | None = None
    """most requests of it a second, besides the bound of its tenant"""
    tokens_per_minute: Positive | None = None
    """tokens of prompts and replies in a minute, after which calls get 429 until the next"""
    budget: Annotated[float, Field(gt=0)] | None = None
    """what its calls may cost in `budget_hours`, in the currency of all prices; beyond it they get 429"""
    budget_hours: Seconds = 24
    """at most [topics] short_hours: what a key has spent is known from the capture log"""


class GatewayPolicy(Section):
    """Another policy of the namespace, whose own deployment trains it and starts its engines."""

    engine_urls: tuple[str, ...] = ()
    """engines that no reloader announces; the others are found by their announcements"""
    renderer: str = "auto"
    max_model_len: Annotated[int, Field(ge=0)] = 0
    """longest sequence, in tokens; 0: as long as its model takes"""
    prices: GatewayPrices | None = None
    """of a million tokens of its calls"""
    awaits: tuple[str, ...] = ("verifier",)
    """as its own `[policy] awaits`: reward sources that its episodes wait for, unless their start says otherwise"""
    reward_deadline_s: Seconds = 60
    """as its own `[policy] reward_deadline_s`"""
    reward_source: str = "verifier"
    """as its own `[reward] source`: it and `awaits` are reserved in its episodes"""


class Gateway(Section):
    """Where agents send their calls."""

    host: str = Field(default="127.0.0.1", description="address to listen on; beyond this machine only with keys")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(default=8900, description="port to listen on")
    processes: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1,
        description="processes that serve the port together, each with a capture log of its own; more than one where "
        "one core is too few",
    )
    keys: dict[str, GatewayKey] = Field(
        default={},
        description='static keys by name: { laptop = { key = "...", tenant = "local" } }; judges = ["verifier"] lets a '
        "key record rewards of that verifier; max_in_flight, max_rate, tokens_per_minute, and budget with "
        "budget_hours, bound what it takes",
    )
    session_secret: SecretStr = Field(
        default=SecretStr(""),
        description="secret behind the keys of sessions, the same for gateways that share them; empty: one of its own, "
        "kept under capture_dir",
    )
    pepper: SecretStr = Field(
        default=SecretStr(""),
        description="secret under which the log has the keys of `millrace key`, the same wherever these are made or "
        "asked for; empty: home/keys/pepper, which the first of them makes",
    )
    public_url: Annotated[str, Field(pattern=r"^(https?://[^/?#\s]+(/[^?#\s]*)?)?$")] = Field(
        default="",
        description="address that clients reach this gateway at, such as https://agents.example.org; empty: http://, "
        "host and port",
    )
    engine_url: str = Field(default="", description="engine that answers token-in, token-out; empty: [engine] url")
    policies: dict[Name, GatewayPolicy] = Field(
        default={},
        description="other policies of the namespace that it serves too, by name: { small = {} }; their engines are "
        "those that announce themselves",
    )
    upstream_url: Address = Field(default="", description="text-only upstream instead: captured, never trainable by RL")
    upstream_key: SecretStr = Field(default=SecretStr(""), description="bearer key for the upstream")
    upstreams: dict[str, GatewayUpstream] = Field(
        default={},
        description='servers of others by name: { openai = { url = "https://api.openai.com/v1", key_env = '
        '"OPENAI_API_KEY" } }',
    )
    routes: tuple[GatewayRoute, ...] = Field(
        default=(),
        description='which of them answers a model, the first that fits: [{ model = "gpt-*", upstream = "openai" }]',
    )
    capture_dir: Path = Field(default=Path(), description="local log of what was captured; empty: under home")
    capture: Literal["best-effort", "required"] = Field(
        default="best-effort",
        description="what becomes of a call while it cannot be captured (a full disk, the bound below): best-effort "
        "serves it and counts what is lost; required answers 503",
    )
    capture_max_bytes: Positive = Field(default=4 << 30, description="most bytes of it that may wait to be sent")
    idle_timeout_s: Seconds = Field(default=300, description="an episode nobody ended ends after this silence")
    keep_alive_s: Annotated[float, Field(ge=0)] = Field(
        default=15,
        description="a stream that waits for its engine gets a comment after each such silence, so that no proxy cuts "
        "it; 0: none",
    )
    strict: bool = Field(
        default=False,
        description="refuse calls whose replies never train because they are held to a shape or drawn under penalties, "
        "and fields that the API does not have; else these are served",
    )
    renderer: str = Field(
        default="auto", description="template, or a family of the renderers package; auto: by the model's type and name"
    )
    tool_parser: Annotated[Literal["hermes"], BeforeValidator(_hermes)] = Field(
        default="hermes",
        description="without effect: the form of tool calls is found from the model's chat template",
    )
    followups: bool = Field(
        default=False,
        description="a user's message that repeats the one before or corrects the reply is a reward of that reply, "
        "source followup, of low confidence",
    )
    max_body_bytes: Positive = Field(default=8 << 20, description="larger requests are refused")
    max_bodies_bytes: Positive = Field(
        default=256 << 20, description="most bytes of requests in flight, together; beyond it new ones get 503"
    )
    body_timeout_s: Seconds = Field(default=60, description="a request whose body takes longer to come is refused")
    max_connections: Positive = Field(
        default=16_384, description="most connections at once; new ones wait, and silent ones are closed after 30 s"
    )
    max_in_flight: Positive = Field(default=1024, description="most requests of one tenant at once; beyond it 429")
    max_rate: Annotated[float, Field(ge=0)] = Field(
        default=0, description="most requests of one tenant a second; beyond it 429; 0: no limit"
    )
    max_sessions: Positive = Field(
        default=50_000, description="most live episodes of one tenant; a call that would begin one more gets 429"
    )


class Otlp(Section):
    """Where OpenTelemetry sends spans of model calls that went elsewhere."""

    enabled: bool = Field(default=False, description="`millrace up` starts it")
    host: str = Field(
        default="127.0.0.1",
        description="address to listen on; beyond this machine only with keys, those of [gateway.keys]",
    )
    port: Annotated[int, Field(ge=0, le=65535)] = Field(default=4318, description="port to listen on")
    home: str = Field(
        default="",
        description="directory of what it took and of what became of it, on a disk of this machine; empty: under home",
    )
    quiet_s: Seconds = Field(default=120, description="a conversation is over when no span of it came for so long")
    max_body_bytes: Positive = Field(default=16 << 20, description="larger requests are refused, uncompressed or not")
    max_open_bytes: Positive = Field(
        default=256 << 20, description="most bytes of spans of conversations that are not over; beyond it 503"
    )


class Engine(Section):
    """What samples tokens."""

    kind: KindName = Field(default="vllm", description="as docs/engines.md; inprocess: for tests and tiny models")
    url: str = Field(default="http://127.0.0.1:8901", description="where it answers")
    local: bool = Field(default=True, description="`millrace up` starts it there; false: bring your own")
    key: SecretStr = Field(
        default=SecretStr(""),
        description="bearer key that gateway and reloader bring and that our engine asks for; an engine that listens "
        "beyond this machine needs one",
    )
    device: Device = Field(default="auto", description="what the local engine runs on")
    max_model_len: Annotated[int, Field(ge=0)] = Field(
        default=0, description="longest sequence of the local engine, in tokens; 0: as long as the model takes"
    )
    max_num_seqs: Positive = Field(default=64, description="sequences the local engine works on at once")
    kv_cache_mb: Positive = Field(
        default=256, description="memory for the key-value cache of the local engine on a CPU"
    )
    weights: Literal["directory", "broadcast"] = Field(
        default="directory",
        description="how versions reach it: directory, a disk that both see; broadcast, from the learner over a group "
        "of processes, and from the directory where that fails",
    )
    cache: str = Field(
        default="",
        description="directory that engine and reloader see, for versions composed of changes; empty: under home for a "
        "local engine, else every version is read whole",
    )
    interrupt: Literal["keep", "abort"] = Field(
        default="keep",
        description="requests under way while weights change: keep freezes them in the engine; abort ends them, and "
        "the gateway asks for the rest with what was sampled so far, which any engine can do",
    )
    args: tuple[str, ...] = Field(default=(), description="more arguments for the local engine")


class Warehouse(Section):
    """The log as tables that SQL reads."""

    enabled: bool = Field(default=True, description="`millrace up` starts it")
    home: str = Field(default="", description="directory of its tables, on a disk of this machine; empty: under home")
    url: SecretStr = Field(
        default=SecretStr(""),
        description="a ClickHouse server in place of that directory: http://user:password@host:8123",
    )
    read_url: SecretStr = Field(
        default=SecretStr(""),
        description="the same server as a user who may only read, for `millrace sql`, `ask` and `replay --select`; "
        "empty: as the user of url, with the setting readonly",
    )
    port: Annotated[int, Field(ge=1, le=65535)] = Field(
        default=8902, description="port of this machine on which it answers queries, read-only"
    )
    memory_mb: Annotated[int, Field(ge=256)] = Field(
        default=1024, description="memory for inserts, merges and queries together, and for caches a fraction of it"
    )
    keep_days: Annotated[int, Field(ge=0)] = Field(
        default=0, description="days after which rows are forgotten; 0: never, but those of raw with its topic"
    )
    query_seconds: Seconds = Field(default=60, description="longest that a query may take")
    query_memory_mb: Positive = Field(default=512, description="memory that one query may take")
    query_rows: Positive = Field(default=1_000_000, description="most rows that a query may give")
