"""A tiny Qwen2 that knows one five-turn conversation with a tool by heart, in two weight versions.

It writes its calls in token sequences that the tokenizer itself would never write (one byte a token), so that whatever
tokenizes text again is found out."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millrace.dialects.rendering.base import NoContinuation
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from millrace.producers.gateway.sessions.session import to_reply
from tests.support import chat_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
USER = {"role": "user", "content": "Add."}
TURNS = 5


def tool_result(turn: int) -> str:
    """What the tool answers in a turn."""
    return f"{turn + 4}.0"


def reply_ids(tokenizer: ChatTokenizer, turn: int) -> list[int]:
    """The tokens of the reply of a turn, 1 to TURNS."""
    if turn == TURNS:
        return tokenizer.encode("Done.<|im_end|>")
    call = f'\n{{"name": "add", "arguments": {{"b":  {turn}, "a": 4.0}}}}\n'
    letters = [id for letter in call for id in tokenizer.encode(letter)]
    thought = tokenizer.encode(f"<think>\nstep {turn}\n</think>\n\n<tool_call>")
    return [*thought, *letters, *tokenizer.encode("</tool_call><|im_end|>")]


def conversation(renderer: TemplateRenderer) -> tuple[list[int], list[int]]:
    """(tokens, 1 where a reply was sampled) of the whole conversation, bridged as the gateway does."""
    messages: list[Any] = [USER]
    tokens = renderer.render(messages, TOOLS)
    mask = [0] * len(tokens)
    for turn in range(1, TURNS + 1):
        ids = reply_ids(renderer.tokenizer, turn)
        tokens, mask = [*tokens, *ids], [*mask, *[1] * len(ids)]
        if turn < TURNS:
            parser = renderer.parser([], TOOLS)
            parser.whole(ids)
            function = {"name": "add", "arguments": parser.reply.calls[0].arguments}
            call = {"id": "c", "type": "function", "function": function}
            messages.append(to_reply({"content": parser.reply.content, "tool_calls": [call]}))
            new = [{"role": "tool", "tool_call_id": "c", "content": tool_result(turn)}]
            between = renderer.bridge(tokens, messages, new, TOOLS)
            assert not isinstance(between, NoContinuation), between
            messages += new
            tokens, mask = [*tokens, *between], [*mask, *[0] * len(between)]
    return tokens, mask


def write(folder: Path) -> tuple[Path, Path]:
    """Train and save the two versions, each whole with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2Config

    renderer = TemplateRenderer(ChatTokenizer(chat_tokenizer.write(folder / "v0")))
    tokens, mask = conversation(renderer)
    end = renderer.tokenizer.eos_token_id
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=end,
        pad_token_id=0,
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    ids, labels = torch.tensor([tokens]), torch.tensor([_labels(tokens, mask)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    saved: list[Path] = []
    for _ in range(400):
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if loss.item() < (0.02, 0.005)[len(saved)]:
            path = folder / f"v{len(saved)}"
            chat_tokenizer.write(path)
            sure = copy.deepcopy(model)
            with torch.no_grad():  # as if at temperature 0.2: sampled at 1 it still says what it learned
                sure.model.norm.weight.mul_(5)
            sure.save_pretrained(path)
            GenerationConfig(eos_token_id=end, pad_token_id=0).save_pretrained(path)
            saved.append(path)
            if len(saved) == 2:
                return saved[0], saved[1]
    raise AssertionError("the tool model did not learn in time")


def _labels(tokens: Sequence[int], mask: Sequence[int]) -> list[int]:
    return [token if sampled else -100 for token, sampled in zip(tokens, mask, strict=True)]
