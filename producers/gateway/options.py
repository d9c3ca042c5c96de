"""What a gateway needs to know, apart from the parts it is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from infra.config import Settings


@dataclass(frozen=True, slots=True)
class Options:
    """`keys` maps static keys to tenants; without any, every caller is `tenant` and may take grants. `rollout_key` is
    the one whose callers may."""

    policy: str
    keys: Mapping[str, str] = field(default_factory=dict)
    rollout_key: str = ""
    tenant: str = "local"
    max_body_bytes: int = 8 << 20
    max_model_len: int = 2048
    idle_timeout_s: float = 300.0
    patience_s: float = 60.0
    awaits: tuple[str, ...] = ()
    reward_deadline_ms: int = 60_000

    @classmethod
    def of(cls, settings: Settings, context: int) -> Options:
        """What a deployment's settings say; `context` is the longest sequence that the model takes."""
        gateway = settings.gateway
        return cls(
            policy=settings.policy.name,
            keys={key.key.get_secret_value(): key.tenant for key in gateway.keys.values()},
            rollout_key=settings.rollout_key,
            max_body_bytes=gateway.max_body_bytes,
            max_model_len=min(settings.engine.max_model_len or context, context),
            idle_timeout_s=gateway.idle_timeout_s,
            awaits=settings.policy.awaits,
            reward_deadline_ms=int(settings.policy.reward_deadline_s * 1000),
        )
