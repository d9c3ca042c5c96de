"""All sections together, what follows from several of them, and what must hold between them; among it, which models
have no price, so that no budget of a key binds their calls."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

from millrace.infra.config.base import Name
from millrace.infra.config.experience import Governance, Policy, Reward, Rollout
from millrace.infra.config.keys import faults, with_workers
from millrace.infra.config.masking import in_arguments, in_text
from millrace.infra.config.serving import Engine, Gateway, Otlp, Warehouse
from millrace.infra.config.training import Learner
from millrace.infra.config.upstreams import GatewayPrices, route_fault
from millrace.infra.config.wire import Archive, Kafka, Telemetry, Topics
from millrace.infra.engines.kinds import KINDS
from millrace.infra.log.topics import TopicSizes
from millrace.infra.process.net import is_local

PREFIX = "MILLRACE_"


class Settings(BaseModel):
    """Everything. Made by `load`."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, validate_default=True)

    namespace: Name = Field(default="dev", description="one deployment: its topics are called <namespace>.something")
    home: Path = Field(default=Path(".millrace"), description="directory for what local services keep")
    objects: str = Field(
        default="",
        description="directory of weights and large records, which all machines share; mount an object store; empty: "
        "under home",
    )
    shared: bool = Field(
        default=True,
        description="`millrace up` starts refine, seal and the warehouse, which serve every policy of the namespace; "
        "false: another deployment in the namespace runs them",
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
    archive: Archive = Archive()
    warehouse: Warehouse = Warehouse()
    otlp: Otlp = Otlp()
    telemetry: Telemetry = Telemetry()

    @property
    def rollout_key(self) -> str:
        """The one of `[gateway.keys]` that `[rollout] key` names; empty where it names none: see `workers_key`."""
        entry = self.gateway.keys.get(self.rollout.key)
        return entry.key.get_secret_value() if entry else ""

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, data: Any) -> object:
        """Fill in what follows from other keys, and make paths absolute: roles may run in other directories. What has
        the wrong type is left as it is: the field that it is for says so."""
        data = with_workers(data)
        home, gateway, engine = data.get("home", ".millrace"), data.get("gateway", {}), data.get("engine", {})
        if not (isinstance(home, str | Path) and isinstance(gateway, Mapping) and isinstance(engine, Mapping)):
            return data
        home, gateway = Path(home).absolute(), dict(gateway)
        engine_url = engine.get("url", Engine.model_fields["url"].default)
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
        if not is_local(self.otlp.host) and not self.gateway.keys:
            raise ValueError(
                f"[otlp] host {self.otlp.host} is reachable from other machines: "
                "set at least one key under [gateway.keys], or listen on 127.0.0.1"
            )
        words = {name: key.key.get_secret_value() for name, key in self.gateway.keys.items()}
        secret = self.gateway.session_secret.get_secret_value()
        pepper = self.gateway.pepper.get_secret_value()
        hosts = (self.gateway.host, self.otlp.host)
        if fault := faults(words, secret, local=all(map(is_local, hosts)), pepper=pepper):
            raise ValueError(fault)
        if self.policy.name in self.gateway.policies:
            raise ValueError(
                f"[gateway.policies.{self.policy.name}] is the name of [policy], which is served in any case"
            )
        if self.gateway.policies and self.gateway.upstream_url:
            raise ValueError("[gateway.policies] have engines, and [gateway] upstream_url stands in place of engines")
        if self.gateway.processes > 1 and not self.gateway.port:
            raise ValueError("[gateway] processes share one port: say which with [gateway] port")
        if wrong := route_fault(self.gateway.upstreams, self.gateway.routes):
            raise ValueError(wrong)
        if self.adapters and not KINDS[self.engine.kind].serves_adapters:
            kinds = " or ".join(name for name, kind in KINDS.items() if kind.serves_adapters)
            raise ValueError(f'[learner] lora: publish = "adapter" needs [engine] kind {kinds}, not {self.engine.kind}')
        if self.rollout.key and self.rollout.key not in self.gateway.keys:
            raise ValueError(f"[rollout] key {self.rollout.key!r} is none of [gateway.keys]: name one of them")
        for name, key in self.gateway.keys.items():
            if key.budget is not None and key.budget_hours > self.topics.short_hours:
                raise ValueError(
                    f"[gateway.keys.{name}] budget_hours {key.budget_hours:g} is above [topics] short_hours "
                    f"{self.topics.short_hours}: a gateway that starts learns what was spent from its capture log, "
                    "which is kept no longer"
                )
        if fault := useless(self.gateway, self.policy.name, self.policy.prices):
            raise ValueError(fault)
        if self.warehouse.read_url.get_secret_value() and not self.warehouse.url.get_secret_value():
            raise ValueError("[warehouse] read_url is how to read from the server of [warehouse] url: set that too")
        hours = self.topics.short_hours if self.archive.raw else self.topics.long_hours
        if self.archive.keep and self.archive.close_hours >= hours:
            raise ValueError(
                f"[archive] close_hours {self.archive.close_hours:g} is not below the {hours} hours that topics keep "
                "what it archives: Kafka would delete records before they are kept"
            )
        for section, local, address in (
            ("kafka", self.kafka.local, self.kafka.bootstrap.rpartition(":")[0]),
            ("engine", self.engine.local, urlsplit(self.engine.url).hostname or ""),
        ):
            if local and not is_local(address):
                raise ValueError(
                    f"[{section}] points at {address or 'nothing'}, and what `millrace up` starts listens on "
                    f"127.0.0.1 only: set local = false there, or an address of this machine"
                )
        return self

    @property
    def unbound(self) -> str | None:
        """What no budget of a key binds, since it has no price; None where there is nothing of that kind."""
        return unbound(self.gateway, self.policy.name, self.policy.prices)

    @property
    def adapters(self) -> bool:
        """Whether versions are adapters."""
        return self.learner.lora.rank > 0 and self.learner.lora.publish == "adapter"

    @property
    def layout(self) -> TopicSizes:
        """What sizes the topics."""
        t = self.topics
        return TopicSizes(self.namespace, self.policy.name, t.slots, t.shards, t.short_hours, t.long_hours)

    @property
    def weights(self) -> str:
        """Where versions of the policy lie. Another namespace may share the directory, and never sees them."""
        return f"{self.objects.rstrip('/')}/{self.namespace}/weights/{self.policy.name}"

    @property
    def warehouse_home(self) -> Path:
        """The directory of the warehouse's tables, which is of this namespace alone."""
        return Path(self.warehouse.home or self.home / "warehouse").absolute() / self.namespace

    @property
    def otlp_home(self) -> Path:
        """Where the receiver of OpenTelemetry keeps its logs, which are of this namespace alone."""
        return Path(self.otlp.home or self.home / "otlp").absolute() / self.namespace

    @property
    def claims(self) -> str:
        """Where records too large for their topic lie."""
        return f"{self.objects.rstrip('/')}/{self.namespace}/claims"

    @property
    def archive_root(self) -> str:
        """Where the archive of the namespace lies."""
        return self.archive.root or f"{self.objects.rstrip('/')}/{self.namespace}/archive"


def mask_values(settings: Settings) -> dict[str, Any]:
    """The settings as plain values, secrets as stars, also those inside URLs and the engine's arguments. What is not
    set is left out, since TOML has no word for it."""
    values: dict[str, Any] = _mask(settings.model_dump(mode="json"))
    values["engine"]["args"] = in_arguments(settings.engine.args)
    return values


def _mask(value: object) -> Any:
    if isinstance(value, dict):
        return {name: _mask(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_mask(inner) for inner in value]
    return in_text(value) if isinstance(value, str) else value


class PricedModels(NamedTuple):
    """Models, as the settings name them: those that have prices, and those that have none."""

    models_with_prices: list[str]
    models_without_prices: list[str]


def prices(gateway: Gateway, policy: str, rates: GatewayPrices | None) -> PricedModels:
    """Of everything that a gateway serves; `rates` are those of its own `policy`, which it serves where no upstream
    stands in place of the engines."""
    by_name: dict[str, GatewayPrices | None] = {}
    if not gateway.upstream_url:
        by_name[f"{policy} ([policy] prices)"] = rates
        by_name |= {f"{name} ([gateway.policies.{name}] prices)": one.prices for name, one in gateway.policies.items()}
    by_name |= {f"{one.model} ([[gateway.routes]] {at} prices)": one.prices for at, one in enumerate(gateway.routes)}
    if gateway.upstream_url:
        by_name["every other model ([gateway] upstream_url, which has no prices: name it by [[gateway.routes]])"] = None
    return PricedModels(_models_of(by_name, has_prices=True), _models_of(by_name, has_prices=False))


def _models_of(by_name: Mapping[str, GatewayPrices | None], *, has_prices: bool) -> list[str]:
    return [name for name, one in by_name.items() if (one is not None) == has_prices]


def unbound(gateway: Gateway, policy: str, rates: GatewayPrices | None) -> str | None:
    """What no budget of a key binds; None where no key has one, or all models have prices."""
    keys = [name for name, key in gateway.keys.items() if key.budget is not None]
    names = prices(gateway, policy, rates).models_without_prices
    if not keys or not names:
        return None
    keys_text = f"[gateway.keys.{keys[0]}] has a budget" if len(keys) == 1 else f"keys have budgets ({', '.join(keys)})"
    return f"{keys_text}, and these models have no prices, so their calls cost nothing: {', '.join(names)}"


def useless(gateway: Gateway, policy: str, rates: GatewayPrices | None) -> str | None:
    """Why the budgets bind nothing at all; None where they bind something."""
    gap = unbound(gateway, policy, rates)
    if gap is None or prices(gateway, policy, rates).models_with_prices:
        return None
    return f"{gap}. No model has a price: the budget would never bind. Set prices, or tokens_per_minute"
