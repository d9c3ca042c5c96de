"""A small byte-level BPE tokenizer that can write Hermes tool calls, with templates of several kinds.

Invariant: the same arguments give the same files."""

from __future__ import annotations

import json
from pathlib import Path

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")

TEMPLATE = """{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{ tool | tojson }}
{% endfor %}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content or '' }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""  # noqa: E501
"""Keeps everything: prefix-stable."""

FORGETFUL = TEMPLATE.replace("{%- if m.reasoning_content %}", "{%- if m.reasoning_content and loop.last %}")
"""Drops the thoughts of every reply but the last, as Qwen3's does across user turns."""

SAMPLES = [
    "What is the weather in Zürich today? Let me check.",
    '{"name": "add", "arguments": {"a": 3, "b": 4}}',
    '{"name": "lookup", "arguments": {"city": "Zürich", "days": 1.0}}',
    "<|im_start|>assistant\nThe answer is 42.<|im_end|>\n<tool_response>\n{'sum': 7}\n</tool_response>",
]


def write(folder: Path, template: str = TEMPLATE, vocabulary: int = 512) -> Path:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja; returns `folder`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(MARKERS),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(SAMPLES * 5, trainer)
    core.add_tokens([AddedToken(token, normalized=False) for token in MARKERS])
    folder.mkdir(parents=True, exist_ok=True)
    core.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    return folder
