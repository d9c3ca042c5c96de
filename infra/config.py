"""The settings: one `millrace.toml`, overridden by environment, overridden by flags.

Invariants: every key is checked, and an unknown one is refused with the nearest valid name; a secret is never shown by
`repr`, `masked` or an error; nothing here touches the network or the disk but the one file; a listener beyond this
machine without keys is refused. Environment: `MILLRACE_NAMESPACE=x`, `MILLRACE_GATEWAY__PORT=8900` (section, two
underscores, key); tables and lists as JSON. `MILLRACE_CONFIG` names the file.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from infra.errors import ConfigError
from infra.topics import NAME, Layout

FILE = "millrace.toml"
PREFIX = "MILLRACE_"
RESERVED = ("CONFIG", "DEPLOYMENT", "ROLE", "SETTINGS")
"""Variables that begin like settings and are none: where the file is, which deployment and role a process belongs to,
and the digest of the settings it was started with."""

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]
Name = Annotated[str, Field(pattern=f"^{NAME.pattern}$")]
Scalar = bool | int | float | str


def _flat(table: Any, above: str = "") -> dict[str, Any]:
    """librdkafka's names from tables: TOML and flags read an unquoted `sasl.password` as a table in a table."""
    out: dict[str, Any] = {}
    for key, value in dict(table).items():
        out |= _flat(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return out


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, hide_input_in_errors=True)


class Kafka(Section):
    """The log. Any Kafka 3.0 or newer does; SASL and TLS settings pass through `options`."""

    bootstrap: str = Field(
        default="127.0.0.1:19092", description="host:port of one or more brokers, separated by commas"
    )
    local: bool = Field(default=True, description="`millrace up` starts one broker there; false: bring your own")
    options: dict[str, Scalar | SecretStr] = Field(
        default={},
        description='passed to librdkafka as they are: "security.protocol", "sasl.username", "sasl.password", ...',
    )
    replication: int = Field(default=-1, description="replicas of every topic that we create; -1: as the brokers say")
    session_timeout_s: Seconds = Field(
        default=6, description="silence after which a process loses its share; brokers refuse less than 6 unless told"
    )
    heap_mb: Positive = Field(default=512, description="memory of the local broker's Java heap")

    @field_validator("options", mode="before")
    @classmethod
    def _hide(cls, value: Any) -> Any:
        flat = _flat(value)
        return {k: SecretStr(v) if _is_secret(k) and isinstance(v, str) else v for k, v in flat.items()}

    def client_options(self) -> dict[str, Any]:
        """`options` for a client, secrets revealed."""
        return {k: v.get_secret_value() if isinstance(v, SecretStr) else v for k, v in self.options.items()}


class Topics(Section):
    """Sizes that are fixed when the topics are made."""

    slots: Positive = Field(
        default=2, description="N: partitions of raw, events and grants, so stage processes that can share"
    )
    shards: Positive = Field(
        default=8, description="S: partitions of trajectories, the most learners that can share one policy"
    )
    short_hours: Positive = Field(default=24, description="how long raw, restricted content is kept")
    long_hours: Positive = Field(default=24 * 90, description="how long the history is kept")


class Policy(Section):
    """The model being trained, and the rules of its admission."""

    name: Name = Field(default="policy", description="its name in topics, labels and requests")
    batch: Positive = Field(default=64, description="B: groups a version is trained on")
    eta: Annotated[int, Field(ge=0)] = Field(
        default=2, description="most versions a trained token may be behind; 0: synchronous"
    )
    group_size: Positive = Field(default=8, description="samples of one prompt, compared with each other")
    release: Literal["reserve", "soft", "reject", "mask-head"] = Field(
        default="reserve",
        description="reserve never needs to drop; soft only reports; reject and mask-head drop what is stale",
    )
    unsolicited_share: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.0, description="share of a batch that production traffic may take"
    )
    short_groups: Literal["drop", "train", "top-up"] = Field(
        default="drop", description="what becomes of a group with missing samples"
    )
    dynamic_sampling: bool = Field(
        default=False, description="groups whose rewards are all equal are rejected, and others fill the batch"
    )
    lease_s: Seconds = Field(default=300, description="log time after which a granted group that never ended expires")
    reward_deadline_s: Seconds = Field(
        default=60, description="log time after which an ended episode is sealed as it is"
    )
    awaits: tuple[str, ...] = Field(default=("verifier",), description="reward sources that every rollout waits for")


class Key(Section):
    """One static key of the gateway."""

    key: Annotated[SecretStr, Field(min_length=1)]
    tenant: Name = "local"


class Gateway(Section):
    """Where agents send their calls."""

    host: str = Field(default="127.0.0.1", description="address to listen on; beyond this machine only with keys")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(default=8900, description="port to listen on")
    keys: dict[str, Key] = Field(
        default={}, description='static keys by name: { laptop = { key = "...", tenant = "local" } }'
    )
    engine_url: str = Field(default="", description="engine that answers token-in, token-out; empty: [engine] url")
    upstream_url: str = Field(default="", description="text-only upstream instead: captured, never trainable by RL")
    upstream_key: SecretStr = Field(default=SecretStr(""), description="bearer key for the upstream")
    capture_dir: Path = Field(default=Path(), description="local log of what was captured; empty: under home")
    capture_max_bytes: Positive = Field(default=4 << 30, description="most bytes of it that may wait to be sent")
    idle_timeout_s: Seconds = Field(default=300, description="an episode nobody ended ends after this silence")
    renderer: str = Field(
        default="auto", description="template, or a family of the renderers package; auto: by the model's type and name"
    )
    tool_parser: Literal["hermes"] = Field(default="hermes", description="form of the tool calls in the model's text")
    max_body_bytes: Positive = Field(default=8 << 20, description="larger requests are refused")
    workers: Positive = Field(default=1, description="processes of the gateway")


class Engine(Section):
    """What samples tokens."""

    kind: Literal["vllm", "inprocess"] = Field(
        default="vllm", description="inprocess: transformers, for tests and tiny models"
    )
    url: str = Field(default="http://127.0.0.1:8901", description="where it answers")
    local: bool = Field(default=True, description="`millrace up` starts it there; false: bring your own")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="what the local engine runs on")
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
    args: tuple[str, ...] = Field(default=(), description="more arguments for vLLM")


class Rollout(Section):
    """The workers that run your agent."""

    agent: str = Field(default="", description="module:function to run, sync or async")
    workers: Annotated[int, Field(ge=0)] = Field(default=1, description="processes")
    concurrency: Positive = Field(default=8, description="episodes at once in each process")
    timeout_s: Seconds = Field(default=120, description="an episode that takes longer ends as failed")
    tasks: str = Field(default="", description="JSONL file or Hugging Face dataset directory with the tasks")
    ahead: Positive = Field(default=64, description="unresolved prompts that the task loader keeps ahead")
    epochs: Annotated[int, Field(ge=0)] = Field(default=0, description="times to go through the tasks; 0: for ever")
    sampling: dict[str, Scalar] = Field(
        default={},
        description="defaults for the agent's calls: max_tokens, and temperature and top_p, which train at 1 only",
    )
    key: str = Field(
        default="", description="name of the gateway's key that workers use, which alone may take grants; the first one"
    )


class Reward(Section):
    """Verifiers that judge ended episodes."""

    verifier: str = Field(default="exact", description="exact, math, or module:function")
    source: str = Field(default="verifier", description="name under which its rewards are recorded")
    rubric: str = Field(default="1", description="version of the rubric; a new one is a new reward")
    timeout_s: Seconds = Field(default=10, description="a verdict that takes longer is a labelled failure")
    workers: Positive = Field(default=1, description="processes that verify")


class Tenant(Section):
    """What one tenant allows."""

    train: bool = Field(default=True, description="whether its traffic may train")
    eligibility: Literal["denied", "audit_only", "tenant_only", "aggregate"] = Field(
        default="aggregate", description="what its content may be used for"
    )
    classification: Literal["public", "internal", "confidential", "restricted"] = Field(
        default="internal", description="label of its content unless an event says more"
    )
    residency: str = Field(default="", description="region its content must stay in")
    redact: bool = Field(default=True, description="whether secrets and personal data are looked for")


class Governance(Section):
    """What may be learned from. A tenant that is not named here is recorded and never trained on."""

    tenants: dict[Name, Tenant] = Field(default={"local": Tenant()}, description="rules by tenant")
    region: str = Field(
        default="", description="where this deployment runs; content of another residency is not trained on"
    )


class Lora(Section):
    """A low-rank adapter that learns in place of the weights."""

    rank: Annotated[int, Field(ge=0)] = 0
    alpha: Positive = 16
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    publish: Literal["merge", "adapter"] = "merge"


class Learner(Section):
    """How versions are trained."""

    algorithm: str = Field(default="grpo", description="any algorithm of docs/algorithms, by name")
    knobs: dict[str, Any] = Field(
        default={}, description='overrides of its preset: { clip_high = 0.3, reward_norm = "group/none" }'
    )
    backend: Literal["torch", "deepspeed", "megatron"] = Field(
        default="torch", description="what computes; the others come with `pip install 'millrace[backends]'`"
    )
    reference: str = Field(default="", description="directory of the frozen model that a KL penalty compares with")
    teacher: str = Field(default="", description="directory of the model that distillation learns from")
    lr: Annotated[float, Field(gt=0)] = Field(default=5e-4, description="learning rate of AdamW")
    warmup: Annotated[int, Field(ge=0)] = Field(
        default=10, description="optimizer steps over which the learning rate rises to lr"
    )
    decay: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="how the learning rate goes on after its warm-up"
    )
    decay_steps: Annotated[int, Field(ge=0)] = Field(
        default=0, description="optimizer steps, warm-up among them, after which linear and cosine stay at lr_floor"
    )
    lr_floor: Annotated[float, Field(ge=0, le=1)] = Field(default=0.0, description="share of lr that they fall to")
    weight_decay: Annotated[float, Field(ge=0)] = Field(default=0.0, description="of AdamW")
    max_grad_norm: Annotated[float, Field(gt=0)] = Field(default=1.0, description="gradients are clipped to this norm")
    lora: Lora = Field(
        default=Lora(),
        description="a rank above 0 trains an adapter on the targets alone; publish: merge writes full weights, "
        "adapter the adapter alone, which vLLM serves on the weights that it began with",
    )
    minibatches: Positive = Field(default=2, description="optimizer steps a version")
    critic_lr: Annotated[float, Field(ge=0)] = Field(default=0.0, description="of a critic; 0: as lr")
    tokens_per_pack: Positive = Field(default=8192, description="tokens of one packed row of a forward pass")
    packing: Literal["sequential", "ffd", "kk"] = Field(
        default="sequential", description="how packed rows are filled: in order, first fit decreasing, most evenly"
    )
    prefix_sharing: bool = Field(
        default=False, description="compute tokens once that samples of a group begin with alike, its prompt above all"
    )
    precision: Literal["fp32", "bf16"] = Field(
        default="fp32", description="what layers compute in; weights, moments, gradients and losses are fp32 always"
    )
    activation_checkpointing: bool = Field(
        default=False, description="layers keep their input alone and compute the rest again in the backward pass"
    )
    offload: tuple[Literal["actor", "critic", "reference", "teacher"], ...] = Field(
        default=(), description="roles whose tensors leave the device between their uses; torch alone"
    )
    learners: Annotated[int, Field(ge=0)] = Field(default=1, description="processes that `millrace up` starts")
    threads: Positive = Field(default=1, description="CPU threads of each")
    host: str = Field(default="127.0.0.1", description="address other learners reach this one at")
    keep: Positive = Field(default=3, description="newest versions whose files are kept")
    anchor_every: Positive = Field(
        default=1, description="engines read every n-th version whole, those between as changes to their parent"
    )
    seed: int = Field(default=0, description="of every random choice")
    session_timeout_s: Seconds = Field(default=6, description="silence after which a learner counts as dead")
    collective_timeout_s: Seconds = Field(
        default=120, description="longest wait of learners for each other; above any step and checkpoint"
    )
    max_versions: Annotated[int, Field(ge=0)] = Field(default=0, description="stop at this version; 0: never")
    trackers: tuple[Literal["jsonl", "tensorboard", "mlflow", "wandb"], ...] = Field(
        default=(), description="where the numbers of each version go besides the ledger and telemetry: under home"
    )


class Telemetry(Section):
    """Where traces and metrics go."""

    exporter: Literal["none", "console", "otlp"] = Field(default="none", description="otlp speaks HTTP with protobuf")
    endpoint: str = Field(default="http://127.0.0.1:4318", description="collector for otlp")
    headers: dict[str, SecretStr] = Field(default={}, description="headers for the collector")
    interval_s: Seconds = Field(default=10, description="how often metrics leave")
    sample: Annotated[float, Field(ge=0, le=1)] = Field(
        default=1.0, description="share of trajectories that are traced"
    )


class Settings(BaseSettings):
    """Everything. Made by `load`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True, hide_input_in_errors=True
    )

    namespace: Name = Field(default="dev", description="one deployment: its topics are called <namespace>.something")
    home: Path = Field(default=Path(".millrace"), description="directory for what local services keep")
    objects: str = Field(
        default="", description="directory or fsspec URI for weights and large records; empty: under home"
    )
    shared: bool = Field(
        default=True,
        description="`millrace up` starts refine and seal, which serve every policy of the namespace; false: another "
        "deployment in the namespace runs them",
    )
    kafka: Kafka = Kafka()
    topics: Topics = Topics()
    policy: Policy = Policy()
    gateway: Gateway = Gateway()
    engine: Engine = Engine()
    rollout: Rollout = Rollout()
    reward: Reward = Reward()
    governance: Governance = Governance()
    learner: Learner = Learner()
    telemetry: Telemetry = Telemetry()

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags and file come merged through `load`; the environment lies between them there."""
        return (init_settings,)

    @property
    def rollout_key(self) -> str:
        """The gateway's key that rollout workers use; empty where the gateway asks for none."""
        chosen = self.gateway.keys.get(self.rollout.key) or next(iter(self.gateway.keys.values()), None)
        return chosen.key.get_secret_value() if chosen else ""

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, data: Any) -> Any:
        """Fill in what follows from other keys, and make paths absolute: roles may run in other directories."""
        home = Path(data.get("home", ".millrace")).absolute()
        gateway = dict(data.get("gateway", {}))
        engine_url = dict(data.get("engine", {})).get("url", Engine.model_fields["url"].default)
        gateway["engine_url"] = gateway.get("engine_url") or engine_url
        gateway["capture_dir"] = gateway.get("capture_dir") or home / "capture"
        return {**data, "home": home, "objects": data.get("objects") or str(home / "objects"), "gateway": gateway}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not is_local(self.gateway.host) and not self.gateway.keys:
            raise ValueError(
                f"[gateway] host {self.gateway.host} is reachable from other machines: "
                "set at least one key under [gateway.keys], or listen on 127.0.0.1"
            )
        if self.adapters and self.engine.kind != "vllm":
            raise ValueError(f'[learner] lora: publish = "adapter" needs [engine] kind vllm, not {self.engine.kind}')
        if self.rollout.key and self.rollout.key not in self.gateway.keys:
            raise ValueError(f"[rollout] key {self.rollout.key!r} is none of [gateway.keys]: name one of them")
        for section, local, address in (
            ("kafka", self.kafka.local, self.kafka.bootstrap.rpartition(":")[0]),
            ("engine", self.engine.local and self.engine.kind == "vllm", urlsplit(self.engine.url).hostname or ""),
        ):
            if local and not is_local(address):
                raise ValueError(
                    f"[{section}] points at {address or 'nothing'}, and what `millrace up` starts listens on "
                    f"127.0.0.1 only: set local = false there, or an address of this machine"
                )
        return self

    @property
    def adapters(self) -> bool:
        """Whether versions are adapters."""
        return self.learner.lora.rank > 0 and self.learner.lora.publish == "adapter"

    @property
    def layout(self) -> Layout:
        """What sizes the topics."""
        t = self.topics
        return Layout(self.namespace, self.policy.name, t.slots, t.shards, t.short_hours, t.long_hours)

    @property
    def weights(self) -> str:
        """Where versions of the policy lie."""
        return f"{self.objects.rstrip('/')}/weights/{self.policy.name}"

    @property
    def claims(self) -> str:
        """Where records too large for their topic lie."""
        return f"{self.objects.rstrip('/')}/claims"


def load(file: Path | None = None, flags: Mapping[str, Any] | None = None) -> Settings:
    """The effective settings. `file` must exist when named (here or by MILLRACE_CONFIG); else ./millrace.toml may be
    missing. `flags` maps dotted keys ("gateway.port") to values and wins over the environment, which wins over the
    file.

    Raises ConfigError with one line for each thing that is wrong."""
    named = file or (Path(os.environ[f"{PREFIX}CONFIG"]) if os.environ.get(f"{PREFIX}CONFIG") else None)
    path = named or Path(FILE)
    data: dict[str, Any] = {}
    if path.exists():
        try:
            data = tomllib.loads(path.read_text())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not TOML: {error}") from None
    elif named:
        raise ConfigError(f"there is no {path}: `millrace init` writes one")
    _check_names(os.environ)
    try:
        environment = EnvSettingsSource(Settings)()
    except ValueError as error:
        raise ConfigError(f"environment: {error.__cause__ or error}: tables and lists are given as JSON") from None
    data = merge(_anchored(data, path.absolute().parent), environment)
    for key, value in (flags or {}).items():
        data = merge(data, _nested(key.split("."), value))
    try:
        return Settings(**data)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(problem) for problem in error.errors())) from None


def variables(flags: Mapping[str, Any]) -> dict[str, str]:
    """The environment that says the same as these flags, for processes that are started with it."""
    return {
        PREFIX + key.upper().replace(".", "__"): value if isinstance(value, str) else json.dumps(value)
        for key, value in flags.items()
    }


def merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Tables are merged, everything else of `high` replaces that of `low`."""
    out = dict(low)
    for key, value in high.items():
        mine = out.get(key)
        out[key] = merge(mine, value) if isinstance(mine, Mapping) and isinstance(value, Mapping) else value
    return out


def masked(settings: Settings) -> dict[str, Any]:
    """The settings as plain values, secrets as stars."""
    return settings.model_dump(mode="json")


def is_local(host: str) -> bool:
    """Whether an address is reachable from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for a word close to a known one, else the known ones."""
    options = sorted(known)
    close = difflib.get_close_matches(word, options, 1, 0.5)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(options)}"


def _nested(keys: list[str], value: Any) -> dict[str, Any]:
    """A flag as a table. Text that begins like a JSON table or list is one, as in the environment."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{'.'.join(keys)} is not JSON: {error}") from None
    for key in reversed(keys):
        value = {key: value}
    return dict(value)


def _anchored(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Relative paths in the file begin where the file lies, so that every command finds the same places."""
    out = merge({"home": ".millrace"}, data)
    kafka = out.get("kafka")
    if isinstance(kafka, dict) and isinstance(options := kafka.get("options"), Mapping):
        kafka["options"] = options = _flat(options)
        files = [key for key in options if key.endswith((".location", ".keytab")) and options[key] != "probe"]
    else:
        files, options = [], {}
    for table, key in (
        (out, "home"),
        (out, "objects"),
        (out.get("gateway"), "capture_dir"),
        (out.get("rollout"), "tasks"),
        (out.get("engine"), "cache"),
        *((options, file) for file in files),
        (out.get("learner"), "reference"),
        (out.get("learner"), "teacher"),
    ):
        if isinstance(table, dict) and isinstance(path := table.get(key), str) and path and "://" not in path:
            table[key] = str(folder / path)
    return out


def _is_secret(key: str) -> bool:
    words = ("password", "passphrase", "secret", "token", "jaas", "key.pem", "oauthbearer.config")
    return any(word in key.lower() for word in words)


def _check_names(environment: Mapping[str, str]) -> None:
    """pydantic reads only names that it knows: what begins like a setting and is none would be lost in silence."""
    for name in environment:
        if not name.upper().startswith(PREFIX):
            continue
        first, nested, _ = name[len(PREFIX) :].lower().partition("__")
        known = Settings.model_fields
        typo = nested or difflib.get_close_matches(first, known, 1, 0.8)
        if first not in known and first.upper() not in RESERVED and typo:
            raise ConfigError(f"environment variable {name} is no setting{nearest(first, known)}")


def _explain(problem: Any) -> str:
    """One line for one of pydantic's findings."""
    where = [str(part) for part in problem["loc"]]
    if problem["type"] == "extra_forbidden":
        return f"{_dotted(where)} is no setting{nearest(where[-1], _model_at(where[:-1]).model_fields)}"
    if not where:
        return str(problem["msg"]).removeprefix("Value error, ")
    return f"{_dotted(where)}: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def _dotted(where: list[str]) -> str:
    return f"[{'.'.join(where[:-1])}] {where[-1]}" if len(where) > 1 else where[0]


def _model_at(where: list[str]) -> type[BaseModel]:
    """The model that holds a location; the key of a table (a key's or tenant's name) is skipped."""
    model: type[BaseModel] = Settings
    for part in where:
        kind: Any = model.model_fields[part].annotation if part in model.model_fields else model
        inner = [a for a in get_args(kind) if isinstance(a, type) and issubclass(a, BaseModel)]
        model = inner[0] if inner else kind if isinstance(kind, type) and issubclass(kind, BaseModel) else model
    return model
