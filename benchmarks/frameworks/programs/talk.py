"""What every program is about: two questions, two tools, and what came of them. Runs in environments without Millrace.

    python PROGRAM BASE_URL KEY VARIANT

Invariant: `done` prints one last line of JSON: the answers as the framework gave them, and the calls of the tools."""

import json
import sys

QUESTIONS = ("What is 3 + 4, and what is 5 + 6? Ask for both at once.", "Now multiply both sums.")
BASE_URL, KEY, VARIANT = (*sys.argv[1:], "", "", "")[:3]
ROOT_URL = BASE_URL.removesuffix("/v1")
"""where clients of Anthropic begin"""
MODEL = "policy"
CALLS: list = []


def add(a: float, b: float) -> str:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    CALLS.append(["add", a, b])
    return f"sum={a + b:g}"


def multiply(a: float, b: float) -> str:
    """Multiply two numbers.

    Args:
        a: the first
        b: the second
    """
    CALLS.append(["multiply", a, b])
    return f"product={a * b:g}"


def schema(name: str) -> dict:
    """A tool as OpenAI's chat completions describe it."""
    numbers = {"a": {"type": "number"}, "b": {"type": "number"}}
    parameters = {"type": "object", "properties": numbers, "required": ["a", "b"]}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


def run(name: str, arguments: dict) -> str:
    """Call a tool by its name."""
    return {"add": add, "multiply": multiply}[name](**arguments)


def done(answers: list) -> None:
    """Say what came of it."""
    print(json.dumps({"answers": [str(answer) for answer in answers], "calls": CALLS}))
