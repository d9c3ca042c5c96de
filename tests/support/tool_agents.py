"""Agents that hold the conversation of the tool model with the real client of each API.

Each takes (URL of the server, key, the turns whose replies are streamed), keeps no thoughts, writes arguments anew as
its own JSON library does, and returns the last answer."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import anthropic
import openai

from tests.support import tool_model

MODEL = "m"
Agent = Callable[[str, str, Collection[int]], Awaitable[str | None]]


async def chat(url: str, key: str, streamed: Collection[int]) -> str | None:
    """Of chat completions."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    messages: list[Any] = [tool_model.USER]
    for turn in range(1, tool_model.TURNS + 1):
        stream = turn in streamed
        answer = await client.chat.completions.create(
            model=MODEL, messages=messages, tools=tool_model.TOOLS, stream=stream
        )
        content, calls = await _streamed(answer) if stream else _plain(answer)
        if not calls:
            return content
        echoed = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": _anew(arguments)}}
            for id, name, arguments in calls
        ]
        messages.append({"role": "assistant", "content": content, "tool_calls": echoed})
        messages += [{"role": "tool", "tool_call_id": id, "content": tool_model.tool_result(turn)} for id, *_ in calls]
    return None


async def messages(url: str, key: str, streamed: Collection[int]) -> str | None:
    """Of Anthropic's Messages. It asks to see the thoughts of streamed replies alone."""
    client = anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0)
    function = tool_model.TOOLS[0]["function"]
    tools = [{"name": function["name"], "input_schema": function["parameters"]}]
    said: list[Any] = [tool_model.USER]
    for turn in range(1, tool_model.TURNS + 1):
        given: Any = {"model": MODEL, "messages": said, "tools": tools, "max_tokens": 4096}
        if turn in streamed:
            given["thinking"] = {"type": "enabled", "budget_tokens": 1024}
            async with client.messages.stream(**given) as stream:
                message = await stream.get_final_message()
        else:
            message = await client.messages.create(**given)
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in message.content if block.type == "text")
        echoed = [{"type": "tool_use", "id": one.id, "name": one.name, "input": one.input} for one in calls]
        results = [
            {"type": "tool_result", "tool_use_id": one.id, "content": tool_model.tool_result(turn)} for one in calls
        ]
        said += [{"role": "assistant", "content": echoed}, {"role": "user", "content": results}]
    return None


async def responses(url: str, key: str, streamed: Collection[int]) -> str | None:
    """Of OpenAI's Responses. It sends the items of the conversation, and names none by an id."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    tools: list[Any] = [{"type": "function", **tool_model.TOOLS[0]["function"]}]
    items: list[Any] = [tool_model.USER]
    for turn in range(1, tool_model.TURNS + 1):
        given: Any = {"model": MODEL, "input": items, "tools": tools}
        if turn in streamed:
            response: Any = None
            async for event in await client.responses.create(**given, stream=True):
                response = event.response if event.type == "response.completed" else response
        else:
            response = await client.responses.create(**given)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return str(response.output_text)
        for call in calls:
            echoed = {"call_id": call.call_id, "name": call.name, "arguments": _anew(call.arguments)}
            items.append({"type": "function_call", **echoed})
        items += [
            {"type": "function_call_output", "call_id": call.call_id, "output": tool_model.tool_result(turn)}
            for call in calls
        ]
    return None


AGENTS: dict[str, Agent] = {"chat": chat, "messages": messages, "responses": responses}
"""by the name of the dialect"""


def _anew(arguments: str) -> str:
    return json.dumps(json.loads(arguments), sort_keys=True, separators=(",", ":"))


def _plain(answer: Any) -> tuple[str | None, list[tuple[str, str, str]]]:
    message = answer.choices[0].message
    return message.content, [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls or ()]


async def _streamed(answer: Any) -> tuple[str | None, list[tuple[str, str, str]]]:
    content, calls = "", dict[int, tuple[str, str, str]]()
    async for chunk in answer:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for piece in delta.tool_calls or ():
            id, name, arguments = calls.get(piece.index, (piece.id, piece.function.name, ""))
            calls[piece.index] = id, name, arguments + (piece.function.arguments or "")
    return content or None, [calls[index] for index in sorted(calls)]
