"""Asks a running gateway held-out questions. Each answer is an episode of its own with split=evaluation: captured and
sealed like all traffic, into `<policy>.evaluations`, and never trained on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from millrace.infra.errors import GatewayError
from millrace.producers.client import AsyncSession, GatewayUnreachable
from millrace.producers.rollout.agents import Agent

log = logging.getLogger(__name__)

SOURCE = "evaluation"
"""of the rewards that judge these episodes"""
TIMEOUT_S = 600.0

Judge = Callable[[int, str, bool], Awaitable[float | None]]
"""Question, text, whether it ended by itself -> its reward; None where the verifier failed."""


@dataclass(frozen=True, slots=True)
class JudgedAnswer:
    """One judged answer to a question."""

    question: int
    finished: bool
    reward: float | None


async def ask(
    base_url: str,
    api_key: str,
    tasks: Sequence[Mapping[str, Any]],
    *,
    name: str,
    model: str,
    n: int,
    judge: Judge,
    concurrency: int,
    sampling: Callable[[int, int], Mapping[str, Any]],
    agent: Agent | None = None,
) -> list[JudgedAnswer]:
    """n answers to the `messages` of each task, in order. name: of this evaluation, part of every group's; sampling:
    of question and sample, fields of the chat request. With an
    `agent` it runs on each task as rollout workers run it, and asks what it likes; one that raises has answered nothing
    and did not finish. Raises GatewayError when the gateway does not answer."""
    slots = asyncio.Semaphore(concurrency)

    async def one(question: int, sample: int) -> JudgedAnswer:
        async with slots:
            try:
                return await _episode(question, sample)
            except openai.OpenAIError as error:
                raise GatewayError(f"question {question} has no answer from {base_url}: {error}") from error

    async def _episode(question: int, sample: int) -> JudgedAnswer:
        task = tasks[question]
        fields: dict[str, Any] = {
            "task_id": str(task.get("id", f"task-{question}")),
            "group": f"{name}-{question}",
            "group_size": n,
            "sample": sample,
            "split": "evaluation",
            "mode": "eval",
            "awaits": [SOURCE],
        }
        async with await AsyncSession.start(base_url, api_key, **fields) as session:
            if agent is None:
                text, has_finished = await _reply(session, question, sample)
            else:
                text, has_finished = await _run(agent, session, dict(task))
            reward = await judge(question, text, has_finished)
            await session.reward(reward, source=SOURCE, **({} if reward is not None else {"label": "unjudged"}))
            await session.end(output=text)
        return JudgedAnswer(question, has_finished, reward)

    async def _reply(session: AsyncSession, question: int, sample: int) -> tuple[str, bool]:
        client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, timeout=TIMEOUT_S)
        async with client:
            fields: Any = {"messages": tasks[question]["messages"], **sampling(question, sample)}
            reply = await client.chat.completions.create(model=model, **fields)
        choice = reply.choices[0]
        return choice.message.content or "", choice.finish_reason != "length"

    every = [one(question, sample) for question in range(len(tasks)) for sample in range(n)]
    return list(await asyncio.gather(*every))


async def _run(agent: Agent, session: AsyncSession, task: dict[str, Any]) -> tuple[str, bool]:
    """What the agent returns for a task, and whether it came to its end."""
    try:
        return await agent(task, session.base_url, session.api_key) or "", True
    except openai.APIConnectionError:
        raise
    except Exception:  # an agent is the user's code: whatever it raises is an episode that failed
        log.exception("the agent failed at task %s", task.get("id", ""))
        return "", False


def versions(base_url: str, api_key: str) -> set[int]:
    """The versions that the gateway's engines serve now. Raises GatewayUnreachable when it does not answer."""
    url = f"{base_url.rstrip('/').removesuffix('/v1')}/health"
    try:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        engines = httpx.get(url, headers=headers, timeout=30).raise_for_status().json().get("engines", {})
    except (httpx.HTTPError, ValueError) as error:
        raise GatewayUnreachable(f"no gateway answers at {url} ({error}): is it up?") from error
    return {int(engine["version"]) for engine in engines.values() if engine["version"] is not None}
