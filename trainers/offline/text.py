"""Text and conversations as tokens, exactly as an engine would see and say them.

Invariants: a prompt is tokenized by itself and a reply after it, so no token spans both; what a chat template writes
behind the end token of a reply is not trained; tokens that are given as such are taken as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

from jinja2 import TemplateError
from transformers import AutoTokenizer

from millrace.trainers.errors import BadConfiguration, BadData

MarkedTokens: TypeAlias = tuple[list[int], list[int]]
"""Tokens, and 1 for each that trains."""


class Encoder:
    """The tokenizer and the chat template of a model directory."""

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise BadConfiguration(f"there is no directory {directory}: name one in Hugging Face layout")
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        except (OSError, ValueError) as error:
            raise BadConfiguration(f"{directory} has no tokenizer that can be loaded: {error}") from error
        self.directory = directory

    @property
    def end(self) -> int:
        """The token that ends a reply."""
        if self._tokenizer.eos_token_id is None:
            raise BadConfiguration(f"the tokenizer of {self.directory} names no end token: set its eos_token")
        return int(self._tokenizer.eos_token_id)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a reply's tokens, without special ones."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def prompt(self, prompt: object, tools: object = None) -> list[int]:
        """Text, messages or tokens -> the tokens that a reply follows."""
        if is_tokens(prompt):
            return list(prompt)
        if isinstance(prompt, str):
            return self._encode(prompt, special=True)
        if is_messages(prompt):
            return self._encode(self._render(prompt, tools, reply=True))
        raise BadData("a prompt is text, a list of messages with role and content, or a list of token ids")

    def exchange(self, prompt: object, reply: object, tools: object = None) -> MarkedTokens:
        """A prompt and the reply to it, of which the reply trains. A text reply to messages is the assistant's."""
        if is_messages(prompt) and isinstance(reply, str):
            reply = [{"role": "assistant", "content": reply}]
        if is_messages(reply):
            if not is_messages(prompt):
                raise BadData("a reply of messages needs a prompt of messages")
            return self.conversation([*prompt, *reply], tools, first=len(prompt))
        before = self.prompt(prompt, tools)
        if is_tokens(reply):
            after = list(reply)
        elif isinstance(reply, str):
            after = self._encode(reply)
            after += [] if after[-1:] == [self.end] else [self.end]
        else:
            raise BadData("a reply is text, a list of messages with role and content, or a list of token ids")
        return before + after, [0] * len(before) + [1] * len(after)

    def conversation(
        self, messages: Sequence[Mapping[str, object]], tools: object = None, first: int = 0
    ) -> MarkedTokens:
        """Every assistant message from number `first` on trains."""
        tokens: list[int] = []
        mask: list[int] = []
        prefix = ""
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or index < first:
                continue
            before = self._render(messages[:index], tools, reply=True)
            after = self._render(messages[: index + 1], tools, reply=False)
            if not (before.startswith(prefix) and after.startswith(before)):
                raise BadData(
                    f"the chat template writes message {index} differently once more follow: "
                    "give each reply a row of its own, as prompt and completion"
                )
            context, answer = self._encode(before[len(prefix) :]), self._encode(after[len(before) :])
            count = self._said(answer)
            tokens += context + answer
            mask += [0] * len(context) + [1] * count + [0] * (len(answer) - count)
            prefix = after
        if not tokens:
            raise BadData("no assistant message to learn from")
        return tokens, mask

    def _said(self, answer: Sequence[int]) -> int:
        """How many tokens of an assistant's turn an engine would sample: those up to the last that ends a reply. Where
        none does, whitespace behind a special token is the template's, as Gemma's newline behind its end of turn."""
        ends = [at for at, token in enumerate(answer) if token in self._ends]
        if ends:
            return ends[-1] + 1
        special = [at for at, token in enumerate(answer) if token in self._special]
        if special and not self._tokenizer.decode(list(answer[special[-1] + 1 :])).strip():
            return special[-1] + 1
        return len(answer)

    @cached_property
    def _ends(self) -> frozenset[int]:
        """The tokens at which engines stop, as the model directory names them."""
        path = self.directory / "generation_config.json"
        setting = json.loads(path.read_bytes()).get("eos_token_id") if path.is_file() else None
        more = setting if isinstance(setting, list) else [setting]
        return frozenset(token for token in (self.end, *more) if isinstance(token, int))

    @cached_property
    def _special(self) -> frozenset[int]:
        added = self._tokenizer.added_tokens_decoder.items()
        return frozenset(int(token) for token, about in added if about.special)

    def _encode(self, text: str, *, special: bool = False) -> list[int]:
        return [int(token) for token in self._tokenizer(text, add_special_tokens=special)["input_ids"]]

    def _render(self, messages: Sequence[Mapping[str, object]], tools: object, *, reply: bool) -> str:
        if not self._tokenizer.chat_template:
            raise BadConfiguration(f"{self.directory} has no chat template: give rows as prompt and completion texts")
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages], tools=tools, tokenize=False, add_generation_prompt=reply
                )
            )
        except (TemplateError, TypeError, ValueError, AttributeError, LookupError, RecursionError) as error:
            reason = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
            raise BadData(f"the chat template refuses it: {reason[:300]}{_nulls(messages)}") from error


def _nulls(messages: Sequence[Mapping[str, object]]) -> str:
    """Which message has no content, for templates that join it to text."""
    nulls = [str(index) for index, message in enumerate(messages) if message["content"] is None]
    return f"; the content of message {', '.join(nulls[:5])} is null: write an empty text" if nulls else ""


def is_tokens(value: object) -> TypeGuard[list[int]]:
    """Whether it is a list of token ids."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(token) is int and -(2**31) <= token < 2**31 for token in value)
    )


def is_messages(value: object) -> TypeGuard[list[Mapping[str, object]]]:
    """Whether it is a list of chat messages."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, Mapping) and isinstance(m.get("role"), str) and "content" in m for m in value)
    )
