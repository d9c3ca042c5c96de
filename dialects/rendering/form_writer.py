"""That nothing a client says is lost on the way into the prompt.

Many templates skip a role that they do not know, without a word. So each kind of conversation is tried once with words
of its own in place of what it says, and what does not show in the result is refused by name.

Invariants: a developer message is a system message unless the form writes developers itself; a message that the form
leaves out is refused; what the form writes in other words (as JSON, in capitals) counts as written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

from millrace.dialects.rendering.base import Message, RenderError, Tools

CACHE_ENTRIES = 4096
"""kinds of conversations whose result is remembered"""
USER: Message = {"role": "user", "content": "a"}

Write = Callable[[list[Message], Tools], str]
"""the text of a conversation; raises RenderError"""


class FormWriter:
    """What one form writes; `write` gives the text of a conversation that asks for a reply."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._known: dict[bytes, int | None] = {}
        try:
            self._developer = self._first_loss([{"role": "developer", "content": "a"}, USER], None, write, 0) is None
        except RenderError:
            self._developer = False

    def roles(self, messages: Sequence[Message]) -> list[Message]:
        """The messages in roles that the form knows."""
        if self._developer:
            return list(messages)
        return [{**m, "role": "system"} if m.get("role") == "developer" else m for m in messages]

    def check(self, messages: Sequence[Message], tools: Tools, *, since: int = 0, bridge: Write | None = None) -> None:
        """Raises RenderError for a message from number `since` on that would leave no trace in the conversation, or in
        what `bridge` adds to one."""
        shape = (*map(_kind, messages), bool(tools), since, bridge is None)
        kinds = blake2b(repr(shape).encode(), digest_size=16).digest()
        cache = self._known
        if kinds in cache:
            at = cache[kinds]
        else:
            try:
                at = self._first_loss(messages, tools, bridge or self._write, since)
            except RenderError:
                at = None  # the form takes these messages, and not our words in them: nothing can be said
            if len(self._known) >= CACHE_ENTRIES:
                self._known = {}
            self._known[kinds] = at
        if at is not None:
            raise RenderError(
                f"message {at} ({messages[at].get('role')}) would be left out: this model's form does not write such a "
                "message there; say it in another role or place"
            )

    def _first_loss(self, messages: Sequence[Message], tools: Tools, write: Write, since: int) -> int | None:
        """The number of the first message without a trace, None where all have one. Raises RenderError."""
        probes = [_saying(message, f"zq{at}xv") for at, message in enumerate(messages)]
        text = write(probes, tools)
        for at in range(since, len(messages)):
            if f"zq{at}xv" in text or _kind(messages[at])[1:] == (False, False):
                continue
            variant = [*probes[:at], _saying(messages[at], f"kw{at}jy"), *probes[at + 1 :]]
            if write(variant, tools) == text:
                return at
        return None


def _kind(message: Message) -> tuple[object, bool, bool]:
    return message.get("role"), bool((message.get("content") or "").strip()), bool(message.get("tool_calls"))


def _saying(message: Message, word: str) -> Message:
    """The message with `word` in place of what it says."""
    out = {name: value for name, value in message.items() if name != "reasoning_content"}
    if (message.get("content") or "").strip():
        out["content"] = word
    if message.get("tool_calls"):
        out["tool_calls"] = [
            {**call, "function": {**call["function"], "name": word, "arguments": "{}"}}
            for call in message["tool_calls"]
        ]
    return out
