"""The settings: one `millrace.toml`, overridden by environment, overridden by flags.

Invariants: every key is checked, and an unknown one is refused with the nearest valid name; a secret is never shown by
`repr`, `mask_values` or an error; nothing here touches the network or the disk but the one file; a listener beyond this
machine without keys is refused. Environment: `MILLRACE_NAMESPACE=x`, `MILLRACE_GATEWAY__PORT=8900` (section, two
underscores, key); tables and lists as JSON. `MILLRACE_CONFIG` names the file.
"""

from __future__ import annotations

from millrace.infra.config.experience import Governance, Policy, Reward, RewardJudge, RewardTests, Rollout, Tenant
from millrace.infra.config.problems import nearest
from millrace.infra.config.read import FILE, load, merge, variables
from millrace.infra.config.serving import Engine, Gateway, GatewayKey, GatewayPolicy, Otlp, Warehouse
from millrace.infra.config.settings import PREFIX, Settings, mask_values
from millrace.infra.config.training import Learner, Lora
from millrace.infra.config.wire import Archive, Kafka, Telemetry, Topics
from millrace.infra.process.net import is_local

__all__ = [
    "FILE",
    "PREFIX",
    "Archive",
    "Engine",
    "Gateway",
    "GatewayKey",
    "GatewayPolicy",
    "Governance",
    "Kafka",
    "Learner",
    "Lora",
    "Otlp",
    "Policy",
    "Reward",
    "RewardJudge",
    "RewardTests",
    "Rollout",
    "Settings",
    "Telemetry",
    "Tenant",
    "Topics",
    "Warehouse",
    "is_local",
    "load",
    "mask_values",
    "merge",
    "nearest",
    "variables",
]
