"""A start by a checkpoint leaves the state that folding the whole log leaves, whatever happened and whoever was killed
when; a checkpoint that is no use costs time only."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import tempfile
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra import faults
from millrace.producers.capture.log import CaptureLog
from millrace.producers.gateway.sessions import checkpoint, sessions
from millrace.producers.gateway.sessions.sessions import Sessions
from millrace.producers.gateway.sessions.streaming_marks import StreamingMarks
from millrace.producers.gateway.spending import KeyLimits, Spending
from millrace.schemas import codec
from tests.support.gateway_world import POLICY
from tests.support.in_process import InProcess, Played

LIMITS = {"": KeyLimits(tokens_per_minute=10**9)}
VOLATILE = {"_path", "touched_at", "places", "_evicted", "_secret", "_requests", "calls", "used", "recorded_at"}
"""what differs between two starts of one log, or says only where its entries lie"""

Step = tuple[str, int]
WORDS = ("chat", "named", "respond", "go on", "start", "in started", "reward", "end", "idle", "copy", "write", "kill")
Steps = st.lists(st.tuples(st.sampled_from(WORDS), st.integers(0, 3)), max_size=30)


def plain(value: Any, seen: dict[int, int] | None = None) -> Any:
    """A value as data that can be compared: objects by their attributes, an object met before by its number."""
    seen = {} if seen is None else seen
    if value is None or isinstance(value, str | bytes | int | float | Path):
        return value
    if isinstance(value, array):
        return list(value)
    if isinstance(value, Mapping):
        return [(plain(key, seen), plain(item, seen)) for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return sorted(repr(plain(item, seen)) for item in value)
    if isinstance(value, list | tuple):
        return [plain(item, seen) for item in value]
    if id(value) in seen:
        return f"object {seen[id(value)]}"
    seen[id(value)] = len(seen)
    names = [*getattr(value, "__dict__", ())] + [
        name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())
    ]
    return [
        type(value).__name__,
        *((name, plain(getattr(value, name), seen)) for name in sorted(names) if name not in VOLATILE),
    ]


def state(folder: Path) -> Any:
    """What a start makes of a folder, all of it."""
    log = CaptureLog(folder)
    try:
        made, spending, underway = Sessions(folder, POLICY), Spending(LIMITS), StreamingMarks(folder)
        made.rebuild(log, spending, underway)
        parts = {name: value for name, value in vars(made).items() if name not in VOLATILE}
        parts["_aliases"] = {key: one.id for key, one in sorted(made._aliases.items())}
        parts["_attempts"] = {key: one.id for key, one in sorted(made._attempts.items())}
        parts["_former"] = {key: one.id for key, one in sorted(made._former.items())}
        owners = made.replies.owners
        parts["replies"] = vars(made.replies) | {
            "owners": {
                "of": {key: sorted(one.id for one in some) for key, some in sorted(owners._owners.items())},
                "told": {key: one.id for key, one in sorted(owners._told.items())},
                "spent": owners.copy(),
            }
        }
        return plain(parts), spending.standing(), sorted(underway.left.items())
    finally:
        log.close()


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Where two states differ."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            name = left[0] if isinstance(left, tuple) and len(left) == 2 and left[0] == right[0] else number
            yield from differences(left, right, f"{where}/{name}")
    elif one != other:
        yield f"{where}: {one} against {other}"


class Story:
    """A gateway in this process to which random things happen."""

    def __init__(self, folder: Path, renderer: TemplateRenderer) -> None:
        self.folder, self.renderer = folder, renderer
        self.count = 0
        self.writers: list[Any] = []
        self.started: list[dict[str, Any]] = []
        self.responses: list[str] = []
        self.open()

    def open(self) -> None:
        self.app = InProcess(self.folder, self.renderer, self.reply, limits=LIMITS)

    def reply(self, body: bytes) -> Played:
        self.count += 1
        ids = self.renderer.tokenizer.encode(f"Reply {self.count % 5}<|im_end|>")
        choice = {
            "index": 0,
            "token_ids": ids,
            "logprobs": {"content": [{"logprob": -0.5}] * len(ids)},
            "finish_reason": "stop",
            "weight_versions": [{"version": "policy@0", "start": 0, "end": len(ids)}],
        }
        return Played(parts=[orjson.dumps({"choices": [choice]})])

    async def post(self, path: str, body: Any, key: str = "x", **headers: str) -> Any:
        answer = await self.app.ask("POST", path, orjson.dumps(body), {"authorization": f"Bearer {key}", **headers})
        return answer.json if answer.status == 200 else {}

    async def step(self, what: str, n: int) -> None:
        messages = [{"role": "user", "content": f"Hi {n}"}]
        every = [*self.app.sessions.live.values()]
        if what == "chat":
            await self.post("/v1/chat/completions", {"model": "m", "messages": messages})
        elif what == "named":
            await self.post("/v1/chat/completions", {"model": "m", "messages": messages}, **{"x-session-id": f"n{n}"})
        elif what == "respond":
            self.responses.append((await self.post("/v1/responses", {"model": "m", "input": f"Hi {n}"})).get("id", ""))
        elif what == "go on" and self.responses:
            body = {"model": "m", "input": "More", "previous_response_id": self.responses[n % len(self.responses)]}
            self.responses.append((await self.post("/v1/responses", body)).get("id", ""))
        elif what == "start":
            self.started.append(await self.post("/v1/sessions", {}))
        elif what == "in started" and self.started:
            key = self.started[n % len(self.started)].get("api_key", "x")
            await self.post("/v1/chat/completions", {"model": "m", "messages": messages}, key)
        elif what == "reward":
            ids = [*self.app.sessions.ended, *self.app.sessions.live]
            if ids:
                await self.post(f"/v1/sessions/{ids[n % len(ids)]}/reward", {"value": 1.0, "reward_id": f"r{n}"})
        elif what == "end" and every:
            await self.post(f"/v1/sessions/{every[n % len(every)].id}/end", {})
        elif what == "idle":
            for session in every[::2]:
                await self.app.gateway.end(session, status="completed", stop_condition="idle")
        elif what == "copy":
            recorder = self.app.gateway.recorder
            self.writers.append(self.app.sessions.checkpoint(recorder.log, recorder.spending, recorder.underway))
        elif what == "write" and self.writers:
            self.writers.pop()()
            self.writers.clear()
        elif what == "kill":
            self.writers.clear()
            self.check()
            await self.app.close()
            self.open()

    def check(self) -> None:
        """The short way and the long one, each over a copy of the folder as it is now."""
        with tempfile.TemporaryDirectory() as scratch:
            short, long = Path(scratch, "short"), Path(scratch, "long")
            shutil.copytree(self.folder / "capture", short)
            shutil.copytree(self.folder / "capture", long)
            (long / checkpoint.FILE).unlink(missing_ok=True)
            assert (*differences(state(short), state(long)),) == ()


async def play(folder: Path, renderer: TemplateRenderer, steps: list[Step]) -> None:
    story = Story(folder, renderer)
    for step in steps:
        await story.step(*step)
    story.check()
    await story.app.close()


@settings(deadline=None, max_examples=40)
@given(Steps, st.integers(1, 4))
@example([("named", 0), ("respond", 1), ("idle", 0), ("copy", 0), ("reward", 0), ("write", 0), ("go on", 0)], 2)
@example([("start", 0), ("in started", 0), ("end", 0), ("copy", 0), ("write", 0), ("reward", 0), ("kill", 0)], 1)
def test_the_short_way_and_the_long_one_lead_to_the_same_state(
    renderer: TemplateRenderer, steps: list[Step], ended: int
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "ENDED_SESSIONS", ended + 2)
        asyncio.run(play(Path(folder), renderer, steps))


@pytest.mark.parametrize("point", ["checkpoint.encoded", "checkpoint.written"])
@pytest.mark.parametrize("has_former", [False, True])
async def test_killed_while_it_writes_a_start_loses_and_doubles_nothing(
    tmp_path: Path, renderer: TemplateRenderer, point: str, has_former: bool
) -> None:
    """A real SIGKILL on each line of the writer, over the checkpoint before and over none."""
    story = Story(tmp_path, renderer)
    former = [("copy", 0), ("write", 0)] if has_former else []
    for step in [("named", 0), ("respond", 0), *former, ("chat", 1), ("idle", 0), ("named", 2), ("copy", 0)]:
        await story.step(*step)
    writer = story.writers.pop()
    await story.step("reward", 0)  # behind the copy, before its file
    if (child := os.fork()) == 0:
        faults.install(lambda name: os.kill(os.getpid(), signal.SIGKILL) if name == point else None)
        writer()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert (tmp_path / "capture" / checkpoint.FILE).exists() == (has_former or point == "checkpoint.written")
    for step in [("kill", 0), ("go on", 0), ("named", 2), ("copy", 0), ("write", 0), ("kill", 0)]:
        await story.step(*step)  # each start is checked against one that folds the whole log
    await story.app.close()


async def test_a_checkpoint_that_is_no_use_is_passed_over(
    tmp_path: Path, renderer: TemplateRenderer, caplog: pytest.LogCaptureFixture
) -> None:
    story = Story(tmp_path, renderer)
    for step in [("named", 0), ("chat", 1), ("respond", 0), ("idle", 0), ("chat", 1), ("copy", 0), ("write", 0)]:
        await story.step(*step)
    await story.app.close()
    path = tmp_path / "capture" / checkpoint.FILE
    right, expected = path.read_bytes(), state(tmp_path / "capture")
    chance = random.Random(7)
    for cut in [0, 1, len(right) - 1, *(chance.randrange(len(right)) for _ in range(20))]:
        caplog.clear()
        path.write_bytes(right[:cut])
        assert state(tmp_path / "capture") == expected
        assert "cannot be used" in caplog.text
    for at in (chance.randrange(len(right)) for _ in range(20)):
        path.write_bytes(right[:at] + bytes([right[at] ^ 1]) + right[at + 1 :])
        assert state(tmp_path / "capture") == expected
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "capture", other)
    path.write_bytes(right)
    (other / "source.json").unlink()
    caplog.clear()
    assert checkpoint.read(CaptureLog(other)) is None
    assert "cannot be used" in caplog.text


FULL = ("respond", "respond", "go on", "chat", "in started", "start", "end", "end", "idle", "reward", "kill")
MIXED = [("chat", 0), ("respond", 0), ("respond", 1), ("idle", 0), ("go on", 0), ("chat", 1), ("end", 0), ("reward", 0)]


def full(seed: int) -> list[Step]:
    """A long history, in which most that begins ends."""
    r = random.Random(seed)
    return [(r.choice(FULL), r.randrange(4)) for _ in range(20)]


@settings(deadline=None, max_examples=15)
@given(st.integers(0).map(full), st.integers(0, 4))
@example([*MIXED, ("end", 0), ("end", 0), ("reward", 1), ("reward", 2), ("named", 0)], 4)
@example([*MIXED, ("end", 0), ("end", 0), ("reward", 1), ("start", 0), ("in started", 0)], 0)
@example([("chat", 0), ("end", 0), ("chat", 1), ("end", 0)], 4)
def test_a_start_reads_again_what_is_alive_and_the_calls_of_what_may_be_named(
    renderer: TemplateRenderer, steps: list[Step], ended: int
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "ENDED_SESSIONS", ended)
        read, needed = asyncio.run(start_again(Path(folder), renderer, steps))
        assert read == needed


async def start_again(folder: Path, renderer: TemplateRenderer, steps: list[Step]) -> tuple[list[Any], list[Any]]:
    """The events that a start decodes behind a checkpoint of everything, and those that it needs: by their kind, place
    in the log and trajectory."""
    story = Story(folder, renderer)
    for step in [*steps, ("copy", 0), ("write", 0)]:
        await story.step(*step)
    made, log = story.app.sessions, story.app.log
    events = [codec.decode_as("Event", stored.entry.value) for stored in log.read()]
    places = {event["id"]: (event["kind"], at, event["trajectory"]) for at, event in enumerate(events)}
    over = {event["trajectory"]: at for at, event in enumerate(events) if event["kind"] == "episode_ended"}
    named = {
        event["trajectory"]
        for event in events
        if event["kind"] == "model_call"
        and made.replies.stored.knows(codec.decode_body("model_call", event["body"])["response_id"])
    }
    needed = [
        (kind, at, id)
        for kind, at, id in places.values()
        if id in made.live
        or (id in named and at < over[id] and kind == "model_call")
        or (id in named and kind == "episode_started" and id not in made.ended)  # it is forgotten but for its responses
    ]
    await story.app.close()
    read, decode, again = list[Any](), codec.decode_as, CaptureLog(folder / "capture")

    def decode_as(name: str, value: bytes) -> Any:
        event = decode(name, value)
        read.append(places[event["id"]])
        return event

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "decode_as", decode_as)
        Sessions(folder / "capture", POLICY).rebuild(again, Spending(LIMITS))
    again.close()
    return sorted(read), sorted(needed)
