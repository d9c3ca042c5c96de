"""What the scripted model says to two questions with tools, and the gateway before it that programs meet.

Invariant: a reply follows from its prompt alone, so a retry and a call more or less change nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from millrace.dialects.rendering.template import TemplateRenderer
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from tests.support import chat_tokenizer
from tests.support.gateway_world import ScriptedEngine, World, world
from tests.support.wire import Witness

SECOND = "Now multiply both sums."
"""by which the second question is known"""
FIRST_ANSWER, LAST_ANSWER = "The sums are 7 and 11.", "The product is 77."
CALLS = [["add", 3.0, 4.0], ["add", 5.0, 6.0], ["multiply", 7.0, 11.0]]
Flavour = Callable[[str], str]


def step(prompt: str) -> str:
    """Where the conversation of this prompt stands: ask, answer, ask_again, answer_again; idle without a question."""
    if SECOND in prompt:
        return "answer_again" if "product=77" in prompt else "ask_again"
    if "3 + 4" not in prompt:
        return "idle"
    return "answer" if "sum=7" in prompt and "sum=11" in prompt else "ask"


def native(prompt: str) -> str:
    """The reply of a model that calls tools by their names and then answers."""
    thought = "<think>\nLet me see.\n</think>\n\n"
    if step(prompt) == "ask" and '"ToolSearch"' in prompt and _name(prompt, "add") == "add":
        return thought + _call("ToolSearch", {"query": "select:mcp__calc__add,mcp__calc__multiply", "max_results": 2})
    said = {
        "ask": lambda: "Let me check.\n" + _calls(prompt, *CALLS[:2]),
        "ask_again": lambda: _calls(prompt, CALLS[2]),
        "answer": lambda: FIRST_ANSWER,
        "answer_again": lambda: LAST_ANSWER,
        "idle": lambda: "Ready.",
    }
    return thought + said[step(prompt)]()


def final_answer(prompt: str) -> str:
    """The same for a framework whose agents answer by a tool."""
    said = {"answer": FIRST_ANSWER, "answer_again": LAST_ANSWER}.get(step(prompt))
    return native(prompt) if said is None else _call("final_answer", {"answer": said})


def fields(prompt: str) -> str:
    """The same for DSPy, which asks for fields instead of tools; one call at a time."""
    asked = prompt.rpartition("[[ ## question ## ]]")[2]
    if "[[ ## next_tool_name ## ]]" not in prompt:
        said = LAST_ANSWER if SECOND in asked else FIRST_ANSWER
        return f"[[ ## reasoning ## ]]\nAs seen.\n\n[[ ## answer ## ]]\n{said}\n\n[[ ## completed ## ]]"
    wanted = CALLS[2:] if SECOND in asked else CALLS[:2]
    seen = [f"product={a * b:g}" if name == "multiply" else f"sum={a + b:g}" for name, a, b in wanted]
    left = [call for call, mark in zip(wanted, seen, strict=True) if mark not in asked]
    name, arguments = (left[0][0], {"a": left[0][1], "b": left[0][2]}) if left else ("finish", {})
    shown = {"next_thought": "On.", "next_tool_name": name, "next_tool_args": json.dumps(arguments)}
    return "\n\n".join([f"[[ ## {key} ## ]]\n{said}" for key, said in shown.items()] + ["[[ ## completed ## ]]"])


def _calls(prompt: str, *calls: list) -> str:  # type: ignore[type-arg]  # a name and two numbers
    return "\n".join(_call(_name(prompt, name), {"a": a, "b": b}) for name, a, b in calls)


def _name(prompt: str, name: str) -> str:
    """What a tool is called there: frameworks put a server's name before it."""
    found = re.search(rf'"name": "([\w.-]*{name})"', prompt)
    return found.group(1) if found else name


def _call(name: str, arguments: dict[str, object]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@asynccontextmanager
async def stage(folder: Path, flavour: Flavour) -> AsyncIterator[tuple[World, Witness, str]]:
    """A gateway before the scripted model, a witness before the gateway, and the witness's URL."""
    tokenizer = ChatTokenizer(chat_tokenizer.write(folder / "chat"))
    engine = ScriptedEngine(lambda prompt, *_: tokenizer.encode(flavour(tokenizer.decode(prompt)) + "<|im_end|>"))
    async with world(folder, TemplateRenderer(tokenizer), engine, max_model_len=200_000) as w:
        w.acknowledge(0)
        witness = Witness(w.url)
        async with witness.serving() as url:
            yield w, witness, url
