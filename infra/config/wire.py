"""The log, its topics, and where traces and metrics go: `[kafka]`, `[topics]`, `[telemetry]`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, field_validator

from millrace.infra.config.base import Positive, Scalar, Seconds, Section


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
    key_file: str = Field(
        default="",
        description="file with the password of a broker that `millrace up` started; empty: keys/broker under home. For "
        "a second deployment beside it",
    )
    replication: int = Field(default=-1, description="replicas of every topic that we create; -1: as the brokers say")
    session_timeout_s: Seconds = Field(
        default=6, description="silence after which a process loses its share; brokers refuse less than 6 unless told"
    )
    heap_mb: Positive = Field(default=512, description="memory of the local broker's Java heap")
    sync: bool = Field(
        default=True,
        description="the local broker has every record on the disk before it answers, so that a power cut loses none; "
        "false is faster, and a power cut may end the deployment",
    )

    @field_validator("bootstrap")
    @classmethod
    def _addresses(cls, value: str) -> str:
        for address in value.split(","):
            host, _, port = address.strip().rpartition(":")
            if not (host and port.isdecimal() and 0 < int(port) < 65536):
                raise ValueError("write it as host:port, or several with commas between them")
        return value

    @field_validator("options", mode="before")
    @classmethod
    def _hide(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value  # refused by its type
        return {k: SecretStr(v) if _is_secret(k) and isinstance(v, str) else v for k, v in flat(value).items()}

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


class Archive(Section):
    """What outlives the topics' hours, as Parquet files beside the weights."""

    keep: bool = Field(default=False, description="`millrace up` starts `millrace archive`")
    root: str = Field(default="", description="directory or URI of the archive; empty: under objects")
    segment_mb: Positive = Field(default=64, description="size at which a range is closed")
    close_hours: Annotated[float, Field(gt=0)] = Field(default=6, description="age at which a smaller one is closed")
    raw: bool = Field(default=False, description="also archive raw, restricted content beyond its hours")


class Telemetry(Section):
    """Where traces and metrics go."""

    exporter: Literal["none", "console", "otlp"] = Field(default="none", description="otlp speaks HTTP with protobuf")
    endpoint: str = Field(default="http://127.0.0.1:4318", description="collector for otlp")
    headers: dict[str, SecretStr] = Field(default={}, description="headers for the collector")
    interval_s: Seconds = Field(default=10, description="how often metrics leave")
    sample: Annotated[float, Field(ge=0, le=1)] = Field(
        default=1.0, description="share of trajectories that are traced"
    )


def flat(table: Any, above: str = "") -> dict[str, Any]:
    """librdkafka's names from tables: TOML and flags read an unquoted `sasl.password` as a table in a table."""
    out: dict[str, Any] = {}
    for key, value in dict(table).items():
        out |= flat(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return out


def _is_secret(key: str) -> bool:
    words = ("password", "passphrase", "secret", "token", "jaas", "key.pem", "oauthbearer.config")
    return any(word in key.lower() for word in words)
