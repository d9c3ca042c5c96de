"""A model call out of the raw request and reply of an API, as instrumentations keep them beside their own attributes:
chat completions, Responses, Messages. Pure.

Invariants: every text, id and argument stays as it was written; content of a kind that has no place in a chat is kept
as a part of its own type; what is the JSON of none of these APIs reads as nothing."""

from __future__ import annotations

from collections.abc import Mapping

from millrace.formats.episodes.rows import Content, json_text, text_of
from millrace.formats.spans.otlp_json import maps

INPUT, OUTPUT = "gen_ai.input.messages", "gen_ai.output.messages"


def raw_call(request: object, reply: object) -> Content:
    """Attributes of GenAI for a request and its reply; empty where they are of no known API."""
    if not isinstance(request, Mapping) or not isinstance(reply, Mapping):
        return {}
    if maps(request.get("messages")) and maps(reply.get("choices")):
        talk = _chat(request, reply)
    elif maps(request.get("messages")) and isinstance(reply.get("content"), list):
        talk = _messages(request, reply)
    elif "input" in request and maps(reply.get("output")):
        talk = _responses(request, reply)
    else:
        return {}
    if not talk[INPUT] or not talk[OUTPUT]:
        return {}
    if id := text_of(reply, "id"):
        talk["gen_ai.response.id"] = id
    if model := text_of(reply, "model"):
        talk["gen_ai.response.model"] = model
    if tools := maps(request.get("tools")):
        talk["gen_ai.tool.definitions"] = [_tool(tool) for tool in tools]
    return talk


def _chat(request: Content | Mapping[str, object], reply: Mapping[str, object]) -> Content:
    out = []
    for choice in maps(reply["choices"]):
        message = choice.get("message")
        if isinstance(message, Mapping):
            out.append(_without_blanks({**message, "role": "assistant", "finish_reason": choice.get("finish_reason")}))
    return {INPUT: [_without_blanks(one) for one in maps(request["messages"])], OUTPUT: out}


def _without_blanks(message: Mapping[str, object]) -> Content:
    """Without what says nothing."""
    return {name: value for name, value in message.items() if value not in (None, [])}


def _messages(request: Mapping[str, object], reply: Mapping[str, object]) -> Content:
    system = request.get("system")
    read: list[Content] = [{"role": "system", "content": _texts(system)}] if system else []
    for one in maps(request["messages"]):
        read += _blocks(text_of(one, "role") or "user", one.get("content"))
    answers = _blocks("assistant", reply["content"])
    if answers and reply.get("stop_reason"):
        answers[0]["finish_reason"] = reply["stop_reason"]
    return {INPUT: read, OUTPUT: answers[:1]}


def _blocks(role: str, content: object) -> list[Content]:
    """A message of blocks as one message, and one more for each result of a tool, which stands before it."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    out: Content = {"role": role, "content": ""}
    parts: list[Content] = []
    results: list[Content] = []
    calls: list[Content] = []
    for block in maps(content):
        match block.get("type"):
            case "text":
                parts.append({"type": "text", "text": text_of(block, "text")})
            case "thinking":
                out["reasoning_content"] = out.get("reasoning_content", "") + text_of(block, "thinking")
            case "tool_use":
                calls.append(_call(text_of(block, "id"), text_of(block, "name"), block.get("input")))
            case "tool_result":
                result = block.get("content")
                results.append(
                    {"role": "tool", "tool_call_id": text_of(block, "tool_use_id"), "content": _texts(result)}
                )
            case str():
                parts.append(dict(block))
    out["content"] = _join_texts(parts)
    if calls:
        out["tool_calls"] = calls
    return [*results, *([out] if parts or calls or "reasoning_content" in out or not results else [])]


def _responses(request: Mapping[str, object], reply: Mapping[str, object]) -> Content:
    system = text_of(request, "instructions")
    read: list[Content] = [{"role": "system", "content": system}] if system else []
    prompt = request["input"]
    read += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _items(maps(prompt))
    answers = _items(maps(reply["output"]))
    answer: Content = {"role": "assistant", "content": ""}
    for one in answers:
        if one["role"] == "assistant":
            answer["content"] += one["content"] if isinstance(one["content"], str) else json_text(one["content"])
            if "tool_calls" in one:
                answer.setdefault("tool_calls", []).extend(one["tool_calls"])
            if "reasoning_content" in one:
                answer["reasoning_content"] = answer.get("reasoning_content", "") + one["reasoning_content"]
    return {INPUT: read, OUTPUT: [answer] if answers else []}


def _items(items: list[Content]) -> list[Content]:
    """Items of Responses as messages: what the model said between two others is one."""
    out: list[Content] = []

    def reply() -> Content:
        if not out or out[-1]["role"] != "assistant":
            out.append({"role": "assistant", "content": ""})
        return out[-1]

    for item in items:
        match item.get("type", "message"):
            case "message":
                role = text_of(item, "role") or "user"
                content = item.get("content")
                text = content if isinstance(content, str) else _join_texts(_parts(content))
                if role == "assistant" and isinstance(text, str) and isinstance(reply()["content"], str):
                    reply()["content"] += text
                else:
                    out.append({"role": role, "content": text})
            case "function_call":
                call = _call(text_of(item, "call_id"), text_of(item, "name"), item.get("arguments", ""))
                reply().setdefault("tool_calls", []).append(call)
            case "function_call_output":
                output = item.get("output")
                text = output if isinstance(output, str) else json_text(output)
                out.append({"role": "tool", "tool_call_id": text_of(item, "call_id"), "content": text})
            case "reasoning":
                thoughts = [*maps(item.get("content")), *maps(item.get("summary"))]
                reasoning = "".join(text_of(part, "text") for part in thoughts)
                if reasoning:
                    reply()["reasoning_content"] = reply().get("reasoning_content", "") + reasoning
    return out


def _parts(content: object) -> list[Content]:
    texts = ("input_text", "output_text", "text")
    return [
        {"type": "text", "text": text_of(part, "text")} if part.get("type") in texts else dict(part)
        for part in maps(content)
        if isinstance(part.get("type"), str)
    ]


def _join_texts(parts: list[Content]) -> str | list[Content]:
    return "".join(part["text"] for part in parts) if all(part["type"] == "text" for part in parts) else parts


def _texts(content: object) -> str:
    if isinstance(content, str):
        return content
    return "".join(text_of(one, "text") or json_text(one) for one in maps(content))


def _call(id: str, name: str, arguments: object) -> Content:
    text = arguments if isinstance(arguments, str) else json_text(arguments)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


def _tool(tool: Content) -> Content:
    if "function" in tool or "input_schema" not in tool:
        return tool
    return {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool["input_schema"]}
