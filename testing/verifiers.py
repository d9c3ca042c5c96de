"""Judging as the reward role judges, and the contract of a verifier.

    from millrace.testing import Attempt, check_verifier

    TASK = {"answer": "012345"}

    def test_the_verifier() -> None:
        right, wrong = check_verifier("my_verifier:verify", [Attempt(TASK, "012345"), Attempt(TASK, "543210")])
        assert (right["value"], wrong["value"]) == (1.0, 0.0)

Invariant: a verdict comes by the code that the role runs: the verifier is loaded by its name, in a process of its own
with a limit of time, and judges the end of an episode that was decoded from a record of the log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import orjson

from millrace.infra.log.base import Record
from millrace.infra.log.topics import full_name
from millrace.schemas import codec
from millrace.schemas.records import Event, Reward
from millrace.streams.reward.judge import Evaluator, Judge
from millrace.streams.reward.pool import Pool
from millrace.testing.events import Episode, Status

NAMESPACE, POLICY, SOURCE = "w", "policy", "verifier"
VERDICT_FIELDS = ("value", "components", "label", "critique", "confidence", "signal")
"""fields of a reward that are the verifier's"""
ODD_OUTPUTS = ("", " \n", "\x00", "nan", "-1", "1e999", "[" * 5_000, "{}", "🙂" * 1_000, "9" * 50_000)
"""outputs that agents give sooner or later"""


@dataclass(frozen=True, slots=True)
class Attempt:
    """An episode to be judged: what the task was, answers included, and how it ended."""

    task: Mapping[str, object]
    output: str
    status: Status = "completed"

    def events(self, number: int = 0) -> list[Event]:
        """The episode as a gateway writes it, with one call of the policy. `number` makes the id of its trajectory."""
        task = orjson.dumps(dict(self.task)).decode()
        name = str(self.task.get("id", "task"))
        episode = Episode(f"attempt-{number}", policy=POLICY, task=task, task_id=name, awaits=(SOURCE,))
        return [episode.start(), episode.call(f"reply-{number}"), episode.end(self.status, self.output)]


def judge(verifier: str, attempts: Sequence[Attempt], *, timeout_s: float = 10.0) -> list[Reward]:
    """The reward of each attempt, in order. `verifier` is what `[reward] verifier` would name: `module:function`,
    `exact` or `math`.

    A verifier that raises, ends its process or takes longer than `timeout_s` gives a reward without a value, whose
    `failure` says why. Raises RewardError when there is no such verifier."""
    return _elsewhere(lambda: asyncio.run(_judge_all(verifier, attempts, timeout_s)))


def check_verifier(
    verifier: str, attempts: Sequence[Attempt], *, timeout_s: float = 10.0, odd: Sequence[str] = ODD_OUTPUTS
) -> list[Reward]:
    """Judge the attempts and return their rewards, in order. Raises AssertionError, which names every attempt that
    shows a breach of the contract:

    - Every attempt gets a value: a finite number within bounds, in time.
    - The verdict follows from task, output and episode alone: another process that judges in the reverse order comes to
      the same.
    - It has a value for any text: the outputs `odd` are judged for the first task, as those of a completed attempt."""
    if not attempts:
        raise ValueError("give at least one attempt to judge")
    odd_attempts = [Attempt(attempts[0].task, output) for output in odd]
    every = [*attempts, *odd_attempts]
    rewards = judge(verifier, every, timeout_s=timeout_s)
    reverse_rewards = judge(verifier, every[::-1], timeout_s=timeout_s)[::-1]
    breaches = [
        line
        for number, (attempt, first, second) in enumerate(zip(every, rewards, reverse_rewards, strict=True))
        for line in _breaches(number, attempt, first, second, timeout_s)
    ]
    assert not breaches, f"{verifier} does not keep the contract of verifiers:\n" + "\n".join(breaches)
    return rewards[: len(attempts)]


def _breaches(number: int, attempt: Attempt, first: Reward, second: Reward, timeout_s: float) -> list[str]:
    output = repr(attempt.output) if len(attempt.output) <= 40 else f"{attempt.output[:30]!r} and so on"
    subject = f"- attempt {number}, whose output is {output},"
    failure = first["failure"] or second["failure"]
    if failure == "timeout":
        return [f"{subject} was not judged within {timeout_s:g} s"]
    if failure == "crash":
        return [f"{subject} ended the verifier's process"]
    if failure is not None:
        return [f"{subject} has no value ({failure}): call the function with it to see where"]
    first_verdict, second_verdict = (
        {name: dict(reward)[name] for name in VERDICT_FIELDS} for reward in (first, second)
    )
    if first_verdict == second_verdict:
        return []
    names = [name for name in VERDICT_FIELDS if first_verdict[name] != second_verdict[name]]
    differences = "; ".join(f"{name} was {first_verdict[name]!r}, then {second_verdict[name]!r}" for name in names)
    return [f"{subject} was judged differently by another process that judged in the reverse order: {differences}"]


async def _judge_all(verifier: str, attempts: Sequence[Attempt], timeout_s: float) -> list[Reward]:
    pool = Pool(verifier, timeout_s=timeout_s)
    answer = Judge(pool, Evaluator(SOURCE, verifier, "1"), POLICY, clock=lambda: 0)
    try:
        return [await _reward(answer, attempt, number) for number, attempt in enumerate(attempts)]
    finally:
        pool.close()


async def _reward(answer: Judge, attempt: Attempt, number: int) -> Reward:
    *_, end = attempt.events(number)
    headers = {"kind": end["kind"].encode()}
    key, value = end["group"].encode(), codec.encode("Event", end)
    out = await answer(Record(full_name(NAMESPACE, "events"), 0, number, key, value, headers, 0))
    assert out is not None, "the reward role has nothing to say about an ended episode that awaits it"
    event: Event = codec.decode_as("Event", out.value or b"")
    reward: Reward = codec.decode_body("reward", event["body"])
    return reward


def _elsewhere(call: Callable[[], list[Reward]]) -> list[Reward]:
    """In a thread without an event loop, so that tests may be async."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(call).result()
