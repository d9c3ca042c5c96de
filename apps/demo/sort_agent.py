"""The demo's agent: asks the model to sort six digits. A stock `openai` client; only base_url and api_key are ours."""

from __future__ import annotations

from functools import cache
from typing import Any

from openai import AsyncOpenAI


@cache
def connection(base_url: str) -> AsyncOpenAI:
    """One client a process: its connections are shared by all episodes."""
    return AsyncOpenAI(base_url=base_url, api_key="set for each episode")


async def agent(task: dict[str, Any], base_url: str, api_key: str) -> str | None:
    """Answer one task; what is returned is the episode's output."""
    client = connection(base_url).with_options(api_key=api_key)
    answer = await client.chat.completions.create(model="sort", messages=task["messages"], max_tokens=8)
    return answer.choices[0].message.content
