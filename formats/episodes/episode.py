"""What a layout makes of rows: an episode as steps, before it has ids.

Invariants: everything in it follows from the rows alone, never from the name of a file, the clock or the machine, so
that the same rows always become the same events; nothing in it is a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from millrace.formats.episodes.rows import Content
from millrace.schemas.ids import Micros
from millrace.schemas.records import EpisodeStatus, Split, ToolStatus


@dataclass(frozen=True, slots=True)
class ReplyStep:
    """A model call. The model read `messages` up to `upto`; replies of one conversation share the list."""

    messages: Sequence[Content]
    upto: int
    message: Content
    tools: Sequence[Content] = ()
    at: Micros | None = None
    model: str = ""
    provider: str = ""
    response_id: str = ""
    """as its provider named it"""
    finish: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 0
    latency_us: int = 0
    span: str | None = None


@dataclass(frozen=True, slots=True)
class ToolUseStep:
    """A tool was asked, where no reply says so. The calls inside of replies need none."""

    call_id: str
    name: str
    arguments: str
    at: Micros | None = None
    span: str | None = None


@dataclass(frozen=True, slots=True)
class ToolAnswerStep:
    """A tool answered."""

    call_id: str
    name: str
    content: str
    status: ToolStatus = "ok"
    at: Micros | None = None
    latency_us: int = 0
    span: str | None = None


@dataclass(frozen=True, slots=True)
class UnansweredStep:
    """Something was said that no reply followed."""

    content: str
    origin: str
    at: Micros | None = None


Step = ReplyStep | ToolUseStep | ToolAnswerStep | UnansweredStep


@dataclass(frozen=True, slots=True)
class ClaimedReward:
    """A judgement that a row claims. reply: of which reply, by its number; None: of the whole episode."""

    value: float
    source: str = ""
    rubric: str = ""
    label: str | None = None
    critique: str | None = None
    components: dict[str, float] = field(default_factory=dict)
    reply: int | None = None
    at: Micros | None = None


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode. task: what is known of the task beside its messages, as JSON; exact_tokens: how many its
    row had, which are left out."""

    steps: Sequence[Step]
    task_id: str = ""
    task: str = ""
    rewards: Sequence[ClaimedReward] = ()
    status: EpisodeStatus = "completed"
    split: Split = "train"
    agent: str = ""
    at: Micros | None = None
    trace: str | None = None
    """32 hex digits, where it was traced"""
    exact_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """Episodes that answer one task and are compared. row: where the first of them lies."""

    row: int
    episodes: Sequence[Episode]
