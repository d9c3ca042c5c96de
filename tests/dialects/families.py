"""The chat templates that families of models publish, each on a small byte tokenizer with that family's tokens.

The templates are those that the package trl holds under its own licence; nothing is copied here. What ends a reply is
what the families' own `generation_config.json` say."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


class Family(NamedTuple):
    """`template` is the name of trl's file; the first of `ends` is the tokenizer's end token, all of them end replies;
    `tokens` are its other tokens. `bos` opens a conversation."""

    name: str
    template: str
    ends: tuple[str, ...]
    tokens: tuple[str, ...]
    bos: str = "<bos>"


CHATML = ("<|im_end|>", "<|endoftext|>")
HERMES = ("<|im_start|>", "<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>")
LLAMA = ("<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>")
DEEPSEEK = (
    *("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>"),
    *("<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)
GLM = (
    *("[gMASK]", "<sop>", "<|assistant|>", "<|system|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_response>", "</tool_response>"),
)
GEMMA4 = (
    *("<|turn>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool>", "<tool|>", '<|"|>'),
    *("<tool_response|>", "<|think|>"),
)
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>")
LFM2 = ("<|im_start|>", "<|tool_call_start|>", "<|tool_call_end|>", "<think>", "</think>")

FAMILIES = [
    Family("Qwen 2.5", "qwen2_5", CHATML, HERMES),
    Family("Qwen 3", "qwen3", CHATML, HERMES),
    Family("Qwen 3 Instruct 2507", "qwen3_instruct_2507", CHATML, HERMES),
    Family("Qwen 3.5, thinking", "qwen3_5_think", CHATML, HERMES),
    Family("Qwen 3.5, not thinking", "qwen3_5_nothink", CHATML, HERMES),
    Family("Qwen 3.6", "qwen3_6", CHATML, HERMES),
    Family("Qwen 3.8", "qwen3_8", CHATML, HERMES),
    Family("Nemotron 3 Nano", "nemotron_3_nano", CHATML, HERMES),
    Family("Llama 3", "llama3", ("<|eot_id|>", "<|end_of_text|>"), LLAMA),
    Family("Llama 3.1", "llama3_1", ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"), LLAMA),
    Family("Llama 3.2", "llama3_2", ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"), LLAMA),
    Family("DeepSeek V3", "deepseekv3", ("<｜end▁of▁sentence｜>",), DEEPSEEK),
    Family("DeepSeek R1 Distill", "deepseek_r1_distill", ("<｜end▁of▁sentence｜>",), DEEPSEEK),
    Family("GLM 4.5", "glm4moe", ("<|endoftext|>", "<|user|>", "<|observation|>"), GLM),
    Family("gpt-oss", "gptoss", ("<|return|>", "<|endoftext|>", "<|call|>"), HARMONY),
    Family("Gemma 2", "gemma", ("<eos>", "<end_of_turn>"), ("<start_of_turn>",)),
    Family("Gemma 3", "gemma3", ("<eos>", "<end_of_turn>"), ("<start_of_turn>",)),
    Family("Gemma 4", "gemma4_v5", ("<eos>", "<turn|>", "<|tool_response>"), GEMMA4),
    Family("Phi 3", "phi3", ("<|endoftext|>", "<|end|>"), ("<|user|>", "<|assistant|>", "<|system|>")),
    Family("Phi 3.5", "phi3_5", ("<|endoftext|>", "<|end|>"), ("<|user|>", "<|assistant|>", "<|system|>")),
    Family("LFM2.5", "lfm2_2_5_v2", ("<|im_end|>",), LFM2),
    Family("Muse Glimmer", "muse_glimmer", ("<|eot|>",), ("<|start|>", "<|message|>", "<|eom|>")),
]


def published(name: str) -> str:
    """The text of a template that trl holds."""
    found = find_spec("trl")
    assert found is not None
    assert found.origin is not None
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


def write(folder: Path, family: Family, template: str | None = None) -> Path:
    """A model directory of a family; `template` in place of the published one. Returns `folder`."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, normalized=False) for token in (family.bos, *family.ends)])
    known = [AddedToken(token, normalized=False, special=token[1] in "|｜") for token in family.tokens]
    core.add_tokens(known)
    folder.mkdir(parents=True, exist_ok=True)
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": family.ends[0], "bos_token": family.bos}))
    ends = [core.token_to_id(token) for token in family.ends]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    (folder / "chat_template.jinja").write_text(published(family.template) if template is None else template)
    return folder
