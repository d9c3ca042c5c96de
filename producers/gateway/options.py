"""What a gateway needs to know, apart from the parts it is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from millrace.infra.config import GatewayKey, GatewayPolicy, Settings
from millrace.infra.config.keys import WORKERS
from millrace.infra.local_keys import workers_key
from millrace.producers.gateway.prices import Prices, to_prices
from millrace.producers.gateway.spending import KeyLimits


@dataclass(frozen=True, slots=True)
class RewardTerms:
    """How episodes of a policy are judged: the sources that they await unless they say otherwise, for how long after
    their end, and the sources of deployed verifiers, which are `verifiers` for who judges for them."""

    awaits: tuple[str, ...] = ()
    reward_deadline_ms: int = 60_000
    verifiers: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """`keys` maps static keys to tenants; without any, every caller is `tenant`. `rollout_key` is the one whose callers
    take grants and speak for every source; it is one of `keys` where there are any. `awaits`, `reward_deadline_ms` and
    `verifiers` are the `RewardTerms` of the gateway's own policy, `other_terms` has those of the others. `judges` are
    the reserved sources that a static key may speak for. `key_names` are the names of static keys, and `limits` what
    each of these may take. `prices` are those of the policy's own calls. `public_url` is where clients reach the
    gateway, empty where it listens. `strict`: what would bar a reply from training by its shape, or would have no
    effect, is refused."""

    policy: str
    keys: Mapping[str, str] = field(default_factory=dict)
    rollout_key: str = ""
    verifiers: frozenset[str] = frozenset()
    judges: Mapping[str, frozenset[str]] = field(default_factory=dict)
    key_names: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, KeyLimits] = field(default_factory=dict)
    prices: Prices | None = None
    tenant: str = "local"
    max_body_bytes: int = 8 << 20
    max_bodies_bytes: int = 256 << 20
    body_timeout_s: float = 60.0
    max_connections: int = 16_384
    max_in_flight: int = 1024
    max_rate: float = 0.0
    max_sessions: int = 50_000
    max_model_len: int = 2048
    idle_timeout_s: float = 300.0
    keep_alive_s: float = 15.0
    patience_s: float = 60.0
    awaits: tuple[str, ...] = ()
    reward_deadline_ms: int = 60_000
    public_url: str = ""
    strict: bool = False
    followups: bool = False
    other_terms: Mapping[str, RewardTerms] = field(default_factory=dict)

    def terms(self, policy: str | None) -> RewardTerms:
        """Those of a policy; of the gateway's own for None, and for one that is not served here any more."""
        own_terms = RewardTerms(self.awaits, self.reward_deadline_ms, self.verifiers)
        return own_terms if policy is None else self.other_terms.get(policy, own_terms)

    @classmethod
    def of(cls, settings: Settings, context: int) -> GatewayOptions:
        """What a deployment's settings say; `context` is the longest sequence that the model takes."""
        gateway, workers = settings.gateway, workers_key(settings)
        keys = {key.key.get_secret_value(): key.tenant for key in gateway.keys.values()}
        return cls(
            policy=settings.policy.name,
            keys={workers: WORKERS, **keys} if keys and workers else keys,
            rollout_key=workers,
            verifiers=frozenset((*settings.policy.awaits, settings.reward.source)),
            judges={key.key.get_secret_value(): frozenset(key.judges) for key in gateway.keys.values()},
            key_names={key.key.get_secret_value(): name for name, key in gateway.keys.items()},
            limits={name: _limits(key) for name, key in gateway.keys.items()},
            prices=to_prices(settings.policy.prices),
            max_body_bytes=gateway.max_body_bytes,
            max_bodies_bytes=gateway.max_bodies_bytes,
            body_timeout_s=gateway.body_timeout_s,
            max_connections=gateway.max_connections,
            max_in_flight=gateway.max_in_flight,
            max_rate=gateway.max_rate,
            max_sessions=gateway.max_sessions,
            max_model_len=min(settings.engine.max_model_len or context, context),
            idle_timeout_s=gateway.idle_timeout_s,
            keep_alive_s=gateway.keep_alive_s,
            awaits=settings.policy.awaits,
            followups=gateway.followups,
            public_url=gateway.public_url.rstrip("/"),
            strict=gateway.strict,
            reward_deadline_ms=int(settings.policy.reward_deadline_s * 1000),
            other_terms={name: _terms(entry) for name, entry in gateway.policies.items()},
        )


def _terms(entry: GatewayPolicy) -> RewardTerms:
    verifiers = frozenset((*entry.awaits, entry.reward_source))
    return RewardTerms(entry.awaits, int(entry.reward_deadline_s * 1000), verifiers)


def _limits(key: GatewayKey) -> KeyLimits:
    return KeyLimits(key.max_in_flight, key.max_rate, key.tokens_per_minute, key.budget, key.budget_hours)
