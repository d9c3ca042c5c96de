"""Real clients of each API behind one face, so that one suite holds for every dialect.

A talk is a list of what each side said: `user(text)`, an `AnswerChoice` of the gateway, `results({id: text})`."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
from websockets.exceptions import InvalidStatus

from tests.support.gateway_world import World

ENDS = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}}}


@dataclass(frozen=True)
class Said:
    """A reply as a client got it. `calls`: id, name, arguments. `end`: stop, length, tool_calls, stop_sequence."""

    id: str
    text: str
    thoughts: str
    calls: tuple[tuple[str, str, Any], ...]
    end: str
    tokens: tuple[int, int]
    raw: Any
    """as the client would send it back"""


@dataclass(frozen=True)
class Results:
    """What tools answered, by the id of the call."""

    texts: Mapping[str, str]


Talk = Sequence[str | Said | Results]


class Speaker(ABC):
    """A client of one API."""

    name: str
    path: str
    rejected: type[Exception]
    unauthorized: type[Exception]
    failed: type[Exception] | tuple[type[Exception], ...]
    """of any status, also in mid-stream"""
    tools = True
    """whether it may offer tools, and replies have thoughts of their own"""
    several = False
    """whether it may ask for several replies at once"""
    stops = True
    """whether it may name stop strings"""
    posts = True
    """whether a request is a body of its own"""
    retrying = True
    """whether the client asks again by itself"""

    def __init__(self, w: World, key: str = "x", *, retries: int = 0, headers: Mapping[str, str] | None = None) -> None:
        self.w, self.key, self.retries, self.headers = w, key, retries, dict(headers or {})

    @abstractmethod
    async def say(
        self,
        talk: Talk,
        *,
        stream: bool,
        tools: Sequence[str] = (),
        system: str = "",
        stop: Sequence[str] = (),
        most: int = 100,
        **more: Any,
    ) -> Said:
        """Ask for the next reply."""  # fmt: skip

    @abstractmethod
    async def first(self, talk: Talk) -> Any:
        """A streamed reply of which one event came; `close` of it leaves."""

    @abstractmethod
    def body(self, text: str) -> dict[str, Any]:
        """The smallest request, as JSON."""


class OpenaiSpeaker(Speaker):
    """OpenAI's client, of any of its APIs."""

    rejected, unauthorized, failed = openai.BadRequestError, openai.AuthenticationError, openai.APIError

    @property
    def client(self) -> openai.AsyncOpenAI:
        return self.w.kept(
            openai.AsyncOpenAI(
                base_url=f"{self.w.url}/v1",
                api_key=self.key,
                max_retries=self.retries,
                default_headers=self.headers,
            )
        )


class ChatSpeaker(OpenaiSpeaker):
    """OpenAI's client of chat completions."""

    name, path = "chat", "/v1/chat/completions"
    several = True

    @staticmethod
    def _messages(talk: Talk, system: str = "") -> list[Any]:
        out: list[Any] = [{"role": "system", "content": system}] if system else []
        for said in talk:
            if isinstance(said, Results):
                out += [{"role": "tool", "tool_call_id": id, "content": text} for id, text in said.texts.items()]
            else:
                out.append({"role": "user", "content": said} if isinstance(said, str) else said.raw)
        return out

    async def say(self, talk, *, stream, tools=(), system="", stop=(), most=100, **more):  # type: ignore[no-untyped-def]
        given: dict[str, Any] = {"model": "m", "messages": self._messages(talk, system), "max_tokens": most, **more}
        if tools:
            functions = [{"name": name, "description": "d", "parameters": SCHEMA} for name in tools]
            given["tools"] = [{"type": "function", "function": function} for function in functions]
        if stop:
            given["stop"] = list(stop)
        if not stream:
            answer = await self.client.chat.completions.create(**given)
            message, usage = answer.choices[0].message.model_dump(exclude_none=True), answer.usage
            return self._said(answer.id, message, answer.choices[0].finish_reason, usage)
        message = {"role": "assistant", "content": ""}
        end, id, usage = "", "", None
        async for chunk in await self.client.chat.completions.create(
            **given, stream=True, stream_options={"include_usage": True}
        ):
            id, usage = chunk.id, chunk.usage or usage
            for choice in chunk.choices:
                delta = choice.delta.model_dump(exclude_none=True)
                message["content"] += delta.get("content", "")
                if "reasoning_content" in delta:
                    message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
                for call in delta.get("tool_calls", ()):
                    calls, at = message.setdefault("tool_calls", []), call.pop("index")
                    if at == len(calls):
                        calls.append(call)
                    else:
                        assert at == len(calls) - 1, "the pieces of a call come one behind the other"
                        calls[at]["function"]["arguments"] += call["function"]["arguments"]
                end = choice.finish_reason or end
        return self._said(id, message, end, usage)

    def _said(self, id: str, message: dict[str, Any], end: str, usage: Any) -> Said:
        calls = tuple(
            (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls", ())
        )
        tokens = (usage.prompt_tokens, usage.completion_tokens)
        text, thoughts = message.get("content") or "", message.get("reasoning_content", "")
        return Said(id, text, thoughts, calls, end, tokens, message)

    async def first(self, talk: Talk) -> Any:
        stream = await self.client.chat.completions.create(model="m", messages=self._messages(talk), stream=True)
        await anext(aiter(stream))
        return stream

    def body(self, text: str) -> dict[str, Any]:
        return {"model": "m", "messages": [{"role": "user", "content": text}]}


class CompletionsSpeaker(OpenaiSpeaker):
    """OpenAI's client of legacy completions: it writes the form of a conversation itself, without tools."""

    name, path = "completions", "/v1/completions"
    several, tools = True, False

    @staticmethod
    def _prompt(talk: Talk, system: str = "") -> str:
        out = [system]
        for said in talk:
            assert not isinstance(said, Results)
            out.append(f"\nUser: {said}\nBot:" if isinstance(said, str) else said.raw)
        return "".join(out)

    async def say(self, talk, *, stream, tools=(), system="", stop=(), most=100, **more):  # type: ignore[no-untyped-def]
        given: dict[str, Any] = {"model": "m", "prompt": self._prompt(talk, system), "max_tokens": most, **more}
        if stop:
            given["stop"] = list(stop)
        if not stream:
            answer = await self.client.completions.create(**given)
            return self._said(answer.id, answer.choices[0].text, answer.choices[0].finish_reason, answer.usage)
        text, end, id, usage = "", "", "", None
        async for chunk in await self.client.completions.create(
            **given, stream=True, stream_options={"include_usage": True}
        ):
            id, usage = chunk.id, chunk.usage or usage
            for choice in chunk.choices:
                text, end = text + choice.text, choice.finish_reason or end
        return self._said(id, text, end, usage)

    def _said(self, id: str, text: str, end: str, usage: Any) -> Said:
        raw = text + ("<|im_end|>" if end == "stop" else "")
        return Said(id, text, "", (), end, (usage.prompt_tokens, usage.completion_tokens), raw)

    async def first(self, talk: Talk) -> Any:
        stream = await self.client.completions.create(model="m", prompt=self._prompt(talk), max_tokens=100, stream=True)
        await anext(aiter(stream))
        return stream

    def body(self, text: str) -> dict[str, Any]:
        return {"model": "m", "max_tokens": 100, "prompt": text}


class MessagesSpeaker(Speaker):
    """Anthropic's client of messages; streams by its helper."""

    name, path = "messages", "/v1/messages"
    rejected, unauthorized, failed = (
        anthropic.BadRequestError,
        anthropic.AuthenticationError,
        anthropic.APIError,
    )

    @property
    def client(self) -> anthropic.AsyncAnthropic:
        return self.w.kept(
            anthropic.AsyncAnthropic(
                base_url=self.w.url,
                api_key=self.key,
                max_retries=self.retries,
                default_headers=self.headers,
            )
        )

    @staticmethod
    def _messages(talk: Talk) -> list[Any]:
        out: list[Any] = []
        for said in talk:
            if isinstance(said, Results):
                blocks = [
                    {"type": "tool_result", "tool_use_id": id, "content": text} for id, text in said.texts.items()
                ]
                out.append({"role": "user", "content": blocks})
            else:
                out.append({"role": "user", "content": said} if isinstance(said, str) else said.raw)
        return out

    async def say(self, talk, *, stream, tools=(), system="", stop=(), most=100, **more):  # type: ignore[no-untyped-def]
        given: dict[str, Any] = {"model": "m", "messages": self._messages(talk), "max_tokens": most}
        given["thinking"] = {"type": "enabled", "budget_tokens": 1024}
        if system:
            given["system"] = system
        if tools:
            given["tools"] = [{"name": name, "description": "d", "input_schema": SCHEMA} for name in tools]
        if stop:
            given["stop_sequences"] = list(stop)
        given |= more
        if not stream:
            return self.said(await self.client.messages.create(**given))
        async with self.client.messages.stream(**given) as events:
            text = "".join([piece async for piece in events.text_stream])
            message = await events.get_final_message()
        assert text == "".join(block.text for block in message.content if block.type == "text")
        return self.said(message)

    def said(self, message: anthropic.types.Message) -> Said:
        text = "".join(block.text for block in message.content if block.type == "text")
        thoughts = "".join(block.thinking for block in message.content if block.type == "thinking")
        calls = tuple((block.id, block.name, block.input) for block in message.content if block.type == "tool_use")
        usage, end = message.usage, str(message.stop_reason)
        tokens = (usage.input_tokens + (usage.cache_read_input_tokens or 0), usage.output_tokens)
        raw = {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]}
        return Said(message.id, text, thoughts, calls, ENDS.get(end, end), tokens, raw)

    async def first(self, talk: Talk) -> Any:
        stream = await self.client.messages.create(
            model="m", messages=self._messages(talk), max_tokens=100, stream=True
        )
        await anext(aiter(stream))
        return stream

    def body(self, text: str) -> dict[str, Any]:
        return {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": text}]}


class ResponsesSpeaker(OpenaiSpeaker):
    """OpenAI's client of responses; streams by its helper."""

    name, path = "responses", "/v1/responses"
    stops = False

    @staticmethod
    def items(talk: Talk) -> list[Any]:
        out: list[Any] = []
        for said in talk:
            if isinstance(said, Results):
                out += [
                    {"type": "function_call_output", "call_id": id, "output": text} for id, text in said.texts.items()
                ]
            elif isinstance(said, str):
                out.append({"role": "user", "content": said})
            else:
                out += said.raw if isinstance(said.raw, list) else [said.raw]
        return out

    def _arguments(self, talk: Talk, tools: Sequence[str], system: str, most: int) -> dict[str, Any]:
        given: dict[str, Any] = {"model": "m", "input": self.items(talk), "max_output_tokens": most}
        if system:
            given["instructions"] = system
        if tools:
            given["tools"] = [
                {"type": "function", "name": name, "description": "d", "parameters": SCHEMA, "strict": False}
                for name in tools
            ]
        return given

    async def say(self, talk, *, stream, tools=(), system="", stop=(), most=100, **more):  # type: ignore[no-untyped-def]
        given = self._arguments(talk, tools, system, most) | more
        if stop:
            given["extra_body"] = {"stop": list(stop)}
        if not stream:
            return self.said(await self.client.responses.create(**given))
        texts, numbers, ended = [], [], None
        async with self.client.responses.stream(**given) as events:
            async for event in events:
                numbers.append(event.sequence_number)
                if event.type == "response.output_text.delta":
                    texts.append(event.delta)
                if event.type in ("response.completed", "response.incomplete"):
                    ended = event.response
        assert ended is not None
        assert numbers == sorted(numbers)
        assert "".join(texts) == ended.output_text
        return self.said(ended)

    def said(self, response: Any) -> Said:
        thoughts = "".join(part.text for item in response.output if item.type == "reasoning" for part in item.summary)
        calls = tuple(
            (item.call_id, item.name, json.loads(item.arguments))
            for item in response.output
            if item.type == "function_call"
        )
        end = "length" if response.status == "incomplete" else "tool_calls" if calls else "stop"
        tokens = (response.usage.input_tokens, response.usage.output_tokens)
        raw = [item.model_dump(exclude_none=True, exclude={"parsed", "parsed_arguments"}) for item in response.output]
        return Said(response.id, response.output_text, thoughts, calls, end, tokens, raw)

    async def first(self, talk: Talk) -> Any:
        stream = await self.client.responses.create(model="m", input=self.items(talk), stream=True)
        await anext(aiter(stream))
        return stream

    def body(self, text: str) -> dict[str, Any]:
        return {"model": "m", "input": text}


class SocketError(Exception):
    """An error event of a socket."""

    @property
    def status_code(self) -> int:
        return int(self.args[0]["status"])


class SocketSpeaker(ResponsesSpeaker):
    """OpenAI's client of responses over a WebSocket, which always streams."""

    name = "responses over a WebSocket"
    posts = retrying = False
    failed = (openai.APIError, SocketError)
    unauthorized = InvalidStatus

    async def say(self, talk, *, stream, tools=(), system="", stop=(), most=100, **more):  # type: ignore[no-untyped-def]
        given = self._arguments(talk, tools, system, most) | more
        async with self.client.responses.connect() as connection:
            return await self.over(connection, **given)

    async def over(self, connection: Any, **given: Any) -> Said:
        """The answer to one request on a socket that is open."""
        await connection.response.create(**given)
        texts = []
        async for event in connection:
            if event.type == "response.output_text.delta":
                texts.append(event.delta)
            if event.type in ("response.completed", "response.incomplete"):
                assert "".join(texts) == event.response.output_text
                return self.said(event.response)
            if event.type == "error":
                raise SocketError(event.model_dump())
        raise AssertionError("the socket ended before its response")

    async def first(self, talk: Talk) -> Any:
        connection = await self.client.responses.connect().__aenter__()
        await connection.response.create(model="m", input=self.items(talk))
        await connection.recv()
        return connection


SPEAKERS: tuple[type[Speaker], ...] = (ChatSpeaker, CompletionsSpeaker, MessagesSpeaker, ResponsesSpeaker)
ALL = (*SPEAKERS, SocketSpeaker)
"""every way in: a dialect may have more than one"""
