"""What clients may say of sessions: the JSON bodies of `/v1/sessions` and what lies below it. What they do not know is
refused.

Invariant: every number, name, list and map of a body is within `millrace.schemas.bounds`; free text is bounded by
the size of the body, its depth and its number of values by `millrace.dialects.shape`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, ParamSpec

import msgspec

from millrace.schemas import bounds
from millrace.schemas.limits import CONTROL
from millrace.schemas.records import ToolStatus
from millrace.schemas.signals import Signal

Count = Annotated[int, msgspec.Meta(ge=0, le=bounds.INT)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=bounds.INT)]
Seed = Annotated[int, msgspec.Meta(ge=-bounds.SEED - 1, le=bounds.SEED)]
Wait = Annotated[int, msgspec.Meta(ge=0, le=bounds.WAIT_MS)]
Micros = Annotated[int, msgspec.Meta(ge=0, le=bounds.WAIT_MS * 1000)]
Amount = Annotated[float, msgspec.Meta(ge=-bounds.REWARD, le=bounds.REWARD)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Names = Annotated[list[str], msgspec.Meta(max_length=bounds.NAMES)]
P = ParamSpec("P")


def post_body(body: Callable[P, msgspec.Struct], *positional: P.args, **fields: P.kwargs) -> dict[str, Any]:
    """A body as our own clients post it: the fields that are named here, which the type checker compares with those of
    the type `body`. The gateway checks their values."""
    assert isinstance(body, type)
    assert issubclass(body, msgspec.Struct)
    assert not positional, "fields are named"
    tag = body.__struct_config__.tag
    return {"kind": tag, **fields} if tag else dict(fields)


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """Its strings are names of at most `bounds.NAME_BYTES` bytes, but for those in `TEXTS`; those in `SOURCES` name who
    speaks, and have no control character."""

    TEXTS: ClassVar[frozenset[str]] = frozenset()
    SOURCES: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        """Raises ValueError, which the decoder reports with its place."""
        for field in self.__struct_fields__:
            if field not in self.TEXTS:
                _check_names(field, getattr(self, field))
            if field in self.SOURCES:
                _check_source(field, getattr(self, field))


def _check_source(field: str, value: str | list[str] | None) -> None:
    for name in value if isinstance(value, list) else (value or "",):
        if CONTROL.search(name):
            raise ValueError(f"{field} has a control character: {name!r}")


def _check_names(field: str, value: Any) -> None:
    if isinstance(value, str):
        # A character has at most four bytes.
        if len(value) > bounds.NAME_BYTES // 4 and len(value.encode()) > bounds.NAME_BYTES:
            raise ValueError(f"{field} is longer than {bounds.NAME_BYTES} bytes")
    elif isinstance(value, list | dict):
        if len(value) > bounds.NAMES:
            raise ValueError(f"{field} has more than {bounds.NAMES} entries")
        for inner in value:
            _check_names(field, inner)
        for inner in value.values() if isinstance(value, dict) else ():
            _check_names(field, inner)


class VersionsIn(Body):
    """What produced the episode besides the weights."""

    agent: str = ""
    harness: str = ""
    prompt: str = ""
    tools: dict[str, str] = {}
    guardrail: str = ""
    retrieval: str = ""
    memory: str = ""


class SamplingIn(Body):
    """Defaults for the calls of a session that name none."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Count | None = None
    seed: Seed | None = None
    max_tokens: Positive | None = None

    def defaults(self) -> dict[str, float | int]:
        """Those that were given."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


class StartIn(Body):
    """`POST /v1/sessions`. With a ticket the episode belongs to that grant's group. `policy`: the one that learns from
    it; the gateway's own where none is named."""

    TEXTS: ClassVar[frozenset[str]] = frozenset({"task"})
    SOURCES: ClassVar[frozenset[str]] = frozenset({"awaits"})

    task_id: str = ""
    task: Any = None
    policy: str | None = None
    ticket: Count | None = None
    group: str | None = None
    group_size: Annotated[int, msgspec.Meta(ge=1, le=bounds.GROUP_SIZE)] = 1
    sample: Count = 0
    attempt: str | None = None
    min_version: Count = 0
    deadline: Count | None = None
    split: Literal["train", "evaluation"] = "train"
    awaits: Names | None = None
    reward_deadline_ms: Wait | None = None
    mode: Literal["online", "batch", "eval"] = "batch"
    versions: VersionsIn = msgspec.field(default_factory=VersionsIn)
    parent: str | None = None
    spawn_call: str | None = None
    sampling: SamplingIn = msgspec.field(default_factory=SamplingIn)
    replay: Literal["deterministic", "approximate", "non_replayable"] | None = None
    budget: dict[Literal["turns", "tokens", "wall_ms"], Wait] = {}


class RewardIn(Body):
    """`POST /v1/sessions/{id}/reward`. Without `response_id` or `target` the whole trajectory is judged."""

    TEXTS: ClassVar[frozenset[str]] = frozenset({"critique"})
    SOURCES: ClassVar[frozenset[str]] = frozenset({"source"})

    value: Amount | None = None
    source: str = "agent"
    reward_id: str | None = None
    response_id: str | None = None
    target_kind: Literal["trajectory", "step", "turn", "token_span", "tool_call", "group"] | None = None
    target: str | None = None
    span_start: Count | None = None
    span_end: Count | None = None
    source_version: str = ""
    rubric_version: str = ""
    components: dict[str, Amount] = {}
    label: str | None = None
    failure: str | None = None
    critique: str | None = None
    supersedes: str | None = None
    independent: bool = False
    signal: Signal | None = None
    confidence: Share | None = None


class FeedbackIn(Body):
    """`POST /v1/feedback`: what a user says of a reply by its id, or of a whole session by its id or by the name that
    the caller gave it. `user` is the end user of that name; `correction` is what should have been said."""

    TEXTS: ClassVar[frozenset[str]] = frozenset({"text", "correction"})
    SOURCES: ClassVar[frozenset[str]] = frozenset({"source"})

    response_id: str | None = None
    session: str | None = None
    user: str | None = None
    rating: Amount | None = None
    label: str | None = None
    text: str | None = None
    correction: str | None = None
    source: str = "user"
    reward_id: str | None = None
    supersedes: str | None = None
    confidence: Share | None = None

    def reward(self) -> RewardIn:
        """The reward that it is. Raises ValueError for feedback that says nothing, or two things at once."""
        if self.rating is None and self.label is None and self.text is None and self.correction is None:
            raise ValueError("feedback has a rating, a label, a text or a correction")
        if self.text is not None and self.correction is not None:
            raise ValueError("feedback has a text or a correction: send the other as feedback of its own")
        return RewardIn(
            value=self.rating,
            source=self.source,
            reward_id=self.reward_id,
            response_id=self.response_id,
            label=self.label or (None if self.correction is None else "corrected"),
            critique=self.text if self.correction is None else self.correction,
            supersedes=self.supersedes,
            independent=True,
            signal="user_feedback",
            confidence=self.confidence,
        )


class EndIn(Body):
    """`POST /v1/sessions/{id}/end`."""

    TEXTS: ClassVar[frozenset[str]] = frozenset({"output", "reason"})

    status: Literal["completed", "failed", "truncated", "aborted", "abandoned"] = "completed"
    stop_condition: str = "agent"
    output: str | None = None
    reason: str | None = None


class ReportIn(Body, kw_only=True):
    """What every event may say of itself. `event_time`: micros, when it happened; default: when it came. `seq`: its
    number at the `source` of its report."""

    event_time: Annotated[int, msgspec.Meta(ge=0, le=bounds.TIME)] | None = None
    seq: Annotated[int, msgspec.Meta(ge=0, le=bounds.VERSION)] | None = None


class ToolCallIn(ReportIn, tag_field="kind", tag="tool_call"):
    """The agent asks a tool. `join`: it was seen on its way to the tool, so that `call_id` is not the model's: find the
    model's call."""

    TEXTS: ClassVar[frozenset[str]] = frozenset({"arguments"})

    name: str
    call_id: str
    arguments: str = "{}"
    response_id: str | None = None
    join: bool = False
    server: str | None = None
    traceparent: str | None = None


class ToolResultIn(ReportIn, tag_field="kind", tag="tool_result"):
    """A tool answered."""

    TEXTS: ClassVar[frozenset[str]] = frozenset({"content"})

    name: str
    call_id: str
    content: str
    status: ToolStatus = "ok"
    tool_version: str | None = None
    latency_us: Micros = 0
    side_effect: Literal["none", "reversible", "irreversible"] | None = None


class ObservationIn(ReportIn, tag_field="kind", tag="observation"):
    """The agent saw something."""

    TEXTS: ClassVar[frozenset[str]] = frozenset({"content"})

    content: str
    media_type: str = "text/plain"
    origin: str = ""


class InjectedIn(Body):
    """One thing that was put into the context."""

    kind: str
    id: str
    version: str = ""


class InternalStateIn(ReportIn, tag_field="kind", tag="internal_state"):
    """What the agent held in mind, in short."""

    TEXTS: ClassVar[frozenset[str]] = frozenset({"summary", "plan_step"})

    summary: str
    plan_step: str | None = None
    confidence: Amount | None = None
    injected: Annotated[list[InjectedIn], msgspec.Meta(max_length=bounds.NAMES)] = []


class UserFeedbackIn(ReportIn, tag_field="kind", tag="user_feedback"):
    """What a person said about a reply."""

    TEXTS: ClassVar[frozenset[str]] = frozenset({"text"})

    response_id: str | None = None
    rating: Amount | None = None
    label: str | None = None
    text: str | None = None


class SecurityLabelIn(ReportIn, tag_field="kind", tag="security_label"):
    """Labels for the trajectory from here on."""

    classification: Literal["public", "internal", "confidential", "restricted"]
    labels: Names = []
    scopes: Names = []


EventIn = ToolCallIn | ToolResultIn | ObservationIn | InternalStateIn | UserFeedbackIn | SecurityLabelIn


class EventsIn(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /v1/sessions/{id}/events`. With a `source` each event has a `seq`, which rises: one that this source has
    reported to the session is taken for a repetition, so that a report may be sent until it is answered."""

    events: Annotated[list[EventIn], msgspec.Meta(max_length=bounds.EVENTS)]
    source: Annotated[str, msgspec.Meta(min_length=1, max_length=bounds.NAME_BYTES // 4)] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError, as that of `Body`."""
        _check_source("source", self.source)


ACTORS: dict[type, str] = {
    ToolCallIn: "agent",
    ToolResultIn: "tool",
    ObservationIn: "environment",
    InternalStateIn: "agent",
    UserFeedbackIn: "user",
    SecurityLabelIn: "agent",
}
"""who speaks in each kind of event"""
