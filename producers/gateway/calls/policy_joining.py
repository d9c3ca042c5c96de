"""The policies that a gateway serves, each from the moment on at which it has a version.

Invariants: no policy waits for another: what one lacks is said in the log, by its name and with what to do, and the
others are served; one that was served from here before is served again though the log is down."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from millrace.dialects.rendering.base import Renderer
from millrace.dialects.rendering.choose import check, choose
from millrace.infra import durable
from millrace.infra.config import Settings
from millrace.infra.engines.base import Engine
from millrace.infra.errors import AccessError, BusError, ConfigError, TopicError
from millrace.infra.log.base import Bus
from millrace.infra.log.readable import passed_over, readable
from millrace.infra.log.topics import full_name
from millrace.infra.versions import here, locate
from millrace.producers.gateway.calls.fleet import Fleet
from millrace.producers.gateway.calls.gateway import Gateway
from millrace.producers.gateway.calls.served_policy import AwaitedPolicy, ServedPolicy
from millrace.producers.gateway.prices import Prices, to_prices
from millrace.schemas.records import WeightVersion

logger = logging.getLogger(__name__)

FIRST_LOOK_S = 0.5
"""between two looks before any policy is served, and so before the port is open"""
LOOK_S = 2.0
"""between two looks for those that are not served yet"""
ANY_LENGTH = 1 << 20


class NotYet(Exception):
    """A policy cannot be served now: the text says why, and what to do."""


class Joining:
    """One policy on its way to being served. `settings`: with its name, its renderer and the folder for what is known
    of it; `longest`: the longest sequence that it is asked for, in tokens, 0 for what its model takes."""

    def __init__(self, settings: Settings, fleet: Fleet, *, longest: int, prices: Prices | None) -> None:
        self.settings = settings
        self.awaited = AwaitedPolicy(settings.policy.name, fleet)
        self._longest = longest
        self._prices = prices
        self.given_up = False

    def look(self, bus: Bus) -> ServedPolicy | None:
        """The policy, where it has a version; else `awaited_policy.why` says what it waits for."""
        awaited_policy, former_kind = self.awaited, self.awaited.kind
        self.given_up = False
        try:
            model = find_model(self.settings, bus)
            renderer = make_renderer(self.settings, model)
            context = context_of(Path(model["uri"]))
        except NotYet as error:
            awaited_policy.why, awaited_policy.kind = str(error), type(error.__cause__).__name__
        except (AccessError, ConfigError) as error:
            awaited_policy.why, awaited_policy.kind = str(error), type(error).__name__
            self.given_up = isinstance(error, ConfigError)
        except Exception as error:  # whatever lies in another's folder, the others are served
            awaited_policy.why, awaited_policy.kind = f"{type(error).__name__}: {error}", type(error).__name__
        else:
            longest = min(self._longest or context, context)
            return ServedPolicy(awaited_policy.policy, renderer, awaited_policy.fleet, longest, self._prices)
        if awaited_policy.kind != former_kind:  # texts of one error differ in their times
            logger.warning("policy %s is not served yet: %s", awaited_policy.policy, awaited_policy.why)
        return None


def joining(settings: Settings, make: Callable[..., Engine], patience_s: float) -> list[Joining]:
    """The policies that the settings name, the gateway's own first. `patience_s`: how long a call waits where the one
    engine that the settings name does not listen yet. Raises ConfigError for a renderer that there is not."""
    gateway, own_policy = settings.gateway, settings.policy.name
    check(gateway.renderer)
    urls = (gateway.engine_url.rstrip("/"),)
    # Where one engine alone is known, a call waits until it has started; where there are more, another may serve it.

    def open_own(url: str, **kind: str) -> Engine:
        return make(url, absent_patience_s=patience_s if urls == (url,) else None, **kind)

    fleet = Fleet(own_policy, open_own, urls)
    prices = to_prices(settings.policy.prices)
    return [
        Joining(settings, fleet, longest=settings.engine.max_model_len, prices=prices),
        *(_other_policy(settings, name, make) for name in gateway.policies),
    ]


def _other_policy(settings: Settings, name: str, make: Callable[..., Engine]) -> Joining:
    """A policy beside the gateway's own."""
    entry = settings.gateway.policies[name]
    check(entry.renderer, f"[gateway.policies.{name}]")
    folder = settings.gateway.capture_dir / "policies" / name
    gateway = settings.gateway.model_copy(update={"renderer": entry.renderer, "capture_dir": folder})
    policy = settings.policy.model_copy(update={"name": name})
    fleet = Fleet(name, make, tuple(url.rstrip("/") for url in entry.engine_urls))
    policy_settings = settings.model_copy(update={"policy": policy, "gateway": gateway})
    return Joining(policy_settings, fleet, longest=entry.max_model_len, prices=to_prices(entry.prices))


async def first(waiting: Sequence[Joining], bus: Bus, stop: asyncio.Event) -> list[ServedPolicy]:
    """Those that can be served, as soon as there is one; none on `stop`. Raises ConfigError where none ever will be,
    and AccessError where the log lets nobody in."""
    while not stop.is_set():
        if served_policies := await _look(waiting, bus):
            return served_policies
        if all(one.given_up for one in waiting):
            raise ConfigError("; ".join(one.awaited.why for one in waiting))
        if all(one.awaited.kind == AccessError.__name__ for one in waiting):
            raise AccessError(waiting[0].awaited.why)
        await asyncio.sleep(FIRST_LOOK_S)
    return []


async def rest(waiting: Sequence[Joining], bus: Bus, gateway: Gateway) -> None:
    """Let those that are not served yet be served, each as soon as it can be: what its folder lacks may still come.
    Runs until all are or it is cancelled."""
    while still_waiting := [one for one in waiting if one.awaited.policy in gateway.engines.awaited]:
        for served_policy in await _look(still_waiting, bus):
            gateway.engines.join(served_policy)
            logger.info("policy %s is served from now on", served_policy.policy)
        await asyncio.sleep(LOOK_S)


async def _look(waiting: Sequence[Joining], bus: Bus) -> list[ServedPolicy]:
    results = await asyncio.gather(*(asyncio.to_thread(one.look, bus) for one in waiting))
    return [served_policy for served_policy in results if served_policy is not None]


def find_model(settings: Settings, bus: Bus) -> dict[str, Any]:
    """Version 0 of the policy, whose tokenizer lies beside its weights. Raises NotYet where there is none, and
    AccessError.

    What lies in the topic besides is passed over: other bytes, another policy's versions, and those whose directory
    holds no model here as long as there is one whose does."""
    name = settings.policy.name
    topic = full_name(settings.namespace, f"{name}.weights")
    # A gateway that served before serves again though the log is down: what it needs lies beside its capture log.
    file = settings.gateway.capture_dir / "model.json"
    try:
        model = _model(settings, bus, topic)
    except BusError as error:
        model = json.loads(file.read_bytes()) if file.is_file() else {}
        if model.get("policy") == name and Path(model["uri"]).is_dir():
            logger.warning("the log does not answer, serving from what is known: %s", error)
            return model
        if isinstance(error, AccessError):
            raise
        if isinstance(error, TopicError):
            why = (
                f"its topics were never made ({error}): with the settings of policy {name}, or with `--set "
                f"policy.name={name}`, `millrace topics` makes them and `millrace policy create` its first version"
            )
        else:
            why = f"the log does not answer, and this gateway has served no version from here before: {error}"
        raise NotYet(why) from error
    if model is None:
        raise NotYet(f"policy {name} has no version yet: `millrace policy create` with its settings makes one")
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    durable.write(file, json.dumps(model))
    return model


def _model(settings: Settings, bus: Bus, topic: str) -> dict[str, Any] | None:
    """The first version that the topic holds, of those whose directory is a model's; else the first of all."""
    first = None
    for record in bus.read(topic, 0):
        event = readable(WeightVersion, record)
        if event is None or event["policy"] != settings.policy.name:
            continue
        event = locate(event, settings.weights)
        model = {name: event[name] for name in ("policy", "uri", "tokenizer_hash", "template_hash")}
        model["uri"] = model["uri"].removeprefix("file://")
        if here(Path(model["uri"], "tokenizer.json")):
            return model
        passed_over(record, "its directory holds no tokenizer.json")
        first = first or model
    return first


def make_renderer(settings: Settings, model: dict[str, Any]) -> Renderer:
    """The renderer of a model. Raises ConfigError for one that this gateway does not have."""
    check(settings.gateway.renderer)
    return choose(
        Path(model["uri"]),
        settings.gateway.renderer,
        tokenizer_hash=model["tokenizer_hash"],
        template_hash=model["template_hash"],
    )


def context_of(folder: Path) -> int:
    """How many tokens the model in a folder takes; a large number when it does not say."""
    path = folder / "config.json"
    config = json.loads(path.read_bytes()) if path.is_file() else {}
    return int(
        config.get("max_position_embeddings")
        or config.get("text_config", {}).get("max_position_embeddings", ANY_LENGTH)
    )
