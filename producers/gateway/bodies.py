"""What clients may say of sessions: the JSON bodies of `/v1/sessions` and what lies below it. What they do not know is
refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

NotNegative = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Signal = Literal[
    "deterministic_check",
    "task_outcome",
    "process_reward",
    "user_feedback",
    "delayed_operational",
    "judge",
    "safety",
]
"""what kind of evidence a reward is, the most trusted first"""


class VersionsIn(msgspec.Struct, forbid_unknown_fields=True):
    """What produced the episode besides the weights."""

    agent: str = ""
    harness: str = ""
    prompt: str = ""
    tools: dict[str, str] = {}
    guardrail: str = ""
    retrieval: str = ""
    memory: str = ""


class StartIn(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /v1/sessions`. With a ticket the episode belongs to that grant's group."""

    task_id: str = ""
    task: Any = None
    ticket: int | None = None
    group: str | None = None
    group_size: int = 1
    sample: int = 0
    attempt: str | None = None
    min_version: int = 0
    deadline: int | None = None
    split: Literal["train", "evaluation"] = "train"
    awaits: list[str] | None = None
    reward_deadline_ms: int | None = None
    mode: Literal["online", "batch", "eval"] = "batch"
    versions: VersionsIn = msgspec.field(default_factory=VersionsIn)
    parent: str | None = None
    spawn_call: str | None = None
    sampling: dict[str, float | int] = {}
    replay: Literal["deterministic", "approximate", "non_replayable"] | None = None
    budget: dict[Literal["turns", "tokens", "wall_ms"], NotNegative] = {}


class RewardIn(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /v1/sessions/{id}/reward`. Without `response_id` or `target` the whole trajectory is judged."""

    value: float | None = None
    source: str = "agent"
    reward_id: str | None = None
    response_id: str | None = None
    target_kind: Literal["trajectory", "step", "turn", "token_span", "tool_call", "group"] | None = None
    target: str | None = None
    span_start: int | None = None
    span_end: int | None = None
    source_version: str = ""
    rubric_version: str = ""
    components: dict[str, float] = {}
    label: str | None = None
    failure: str | None = None
    critique: str | None = None
    supersedes: str | None = None
    independent: bool = False
    signal: Signal | None = None
    confidence: Share | None = None


class EndIn(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /v1/sessions/{id}/end`."""

    status: Literal["completed", "failed", "truncated", "aborted", "abandoned"] = "completed"
    stop_condition: str = "agent"
    output: str | None = None
    reason: str | None = None


class ToolCallIn(msgspec.Struct, forbid_unknown_fields=True, tag_field="kind", tag="tool_call"):
    """The agent asks a tool."""

    name: str
    call_id: str
    arguments: str = "{}"
    response_id: str | None = None


class ToolResultIn(msgspec.Struct, forbid_unknown_fields=True, tag_field="kind", tag="tool_result"):
    """A tool answered."""

    name: str
    call_id: str
    content: str
    status: Literal["ok", "error", "timeout", "denied", "cancelled"] = "ok"
    tool_version: str | None = None
    latency_us: int = 0
    side_effect: Literal["none", "reversible", "irreversible"] | None = None


class ObservationIn(msgspec.Struct, forbid_unknown_fields=True, tag_field="kind", tag="observation"):
    """The agent saw something."""

    content: str
    media_type: str = "text/plain"
    origin: str = ""


class InjectedIn(msgspec.Struct, forbid_unknown_fields=True):
    """One thing that was put into the context."""

    kind: str
    id: str
    version: str = ""


class InternalStateIn(msgspec.Struct, forbid_unknown_fields=True, tag_field="kind", tag="internal_state"):
    """What the agent held in mind, in short."""

    summary: str
    plan_step: str | None = None
    confidence: float | None = None
    injected: list[InjectedIn] = []


class UserFeedbackIn(msgspec.Struct, forbid_unknown_fields=True, tag_field="kind", tag="user_feedback"):
    """What a person said about a reply."""

    response_id: str | None = None
    rating: float | None = None
    label: str | None = None
    text: str | None = None


class SecurityLabelIn(msgspec.Struct, forbid_unknown_fields=True, tag_field="kind", tag="security_label"):
    """Labels for the trajectory from here on."""

    classification: Literal["public", "internal", "confidential", "restricted"]
    labels: list[str] = []
    scopes: list[str] = []


EventIn = ToolCallIn | ToolResultIn | ObservationIn | InternalStateIn | UserFeedbackIn | SecurityLabelIn


class EventsIn(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /v1/sessions/{id}/events`."""

    events: list[EventIn]


ACTORS: dict[type, str] = {
    ToolCallIn: "agent",
    ToolResultIn: "tool",
    ObservationIn: "environment",
    InternalStateIn: "agent",
    UserFeedbackIn: "user",
    SecurityLabelIn: "agent",
}
"""who speaks in each kind of event"""
