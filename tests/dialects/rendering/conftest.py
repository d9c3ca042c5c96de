"""Models of two families on the same small tokenizer: Qwen3 in its own form, and one that nobody knows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from millrace.dialects.rendering.base import Renderer
from millrace.dialects.rendering.package import PackagedRenderer
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from tests.support import chat_tokenizer

QWEN3 = """{%- set last = namespace(user=messages | length - 1, found=false) %}
{%- for m in messages | reverse %}{% if m.role == 'user' and not last.found %}
{%- set last.user = messages | length - 1 - loop.index0 %}{% set last.found = true %}
{%- endif %}{% endfor %}
{%- set head = messages[0].content if messages[0].role == 'system' else none %}
{%- if tools or head is not none %}{{ '<|im_start|>system\\n' }}{{ head or '' }}
{%- if tools %}{{ '\\n\\n' if head is not none }}{{ '# Tools\\n\\nYou may call one or more functions to assist with \
the user query.\\n\\nYou are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
{{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n\
</tool_call>' }}
{%- endif %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user' if loop.previtem.role != 'tool' }}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
{%- if loop.index0 > last.user and (loop.last or m.reasoning_content) %}
{{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}{{ '\\n' if m.content or not loop.first }}
{{- '<tool_call>\\n{\\"name\\": \\"' + call.function.name + '\\", \\"arguments\\": ' }}
{{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}{% endfor %}{{ '<|im_start|>assistant\\n' if add_generation_prompt }}"""


def write(folder: Path, tokens: tuple[str, ...] = ("<tool_response>", "</tool_response>"), kind: str = "qwen3") -> Path:
    """A model directory of a known family, with the tokens that it needs beyond the small tokenizer's."""
    chat_tokenizer.write(folder, QWEN3)
    core = Tokenizer.from_file(str(folder / "tokenizer.json"))
    core.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    core.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    return folder


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session", params=["template", "packaged"])
def either(request: pytest.FixtureRequest, qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """Each sibling of the seam."""
    if request.param == "packaged":
        return PackagedRenderer(ChatTokenizer(qwen3), "qwen3")
    return TemplateRenderer(ChatTokenizer(chat_tokenizer.write(tmp_path_factory.mktemp("unknown"))))
