"""Which renderer a model gets: the `renderers` package where it knows the family, else the model's own template.

Invariant: `auto` takes the package only if it writes every probe conversation that the model's template writes, exactly
as that does, so a fine-tune with a changed template keeps its own form."""

from __future__ import annotations

import json
import logging
from datetime import datetime
from itertools import product
from pathlib import Path

from renderers.base import MODEL_RENDERER_MAP

from millrace.dialects.rendering.base import Message, Renderer, RenderError
from millrace.dialects.rendering.package import PackagedRenderer, has_renderer
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from millrace.infra.errors import ConfigError
from millrace.schemas.json_values import JsonObject

logger = logging.getLogger(__name__)

TYPES = {"qwen3": "qwen3", "qwen3_moe": "qwen3"}
"""model_type of config.json to the package's family"""

TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "ü", "parameters": {"type": "object", "a": [1]}}}
]
SYSTEM: Message = {"role": "system", "content": "Be brief."}
USER: Message = {"role": "user", "content": "What is 3 + 4?"}
ANSWER: Message = {"role": "assistant", "content": "It is 7."}
THOUGHTS: Message = {"role": "assistant", "content": "It is 7.", "reasoning_content": "3 + 4 = 7"}
CALL: Message = {
    "role": "assistant",
    "content": "I add.",
    "reasoning_content": "add",
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": 3.0, "b": "ü"}'}}],
}
TOOL: Message = {"role": "tool", "tool_call_id": "a", "name": "f", "content": "7"}
PROBES: list[list[Message]] = [
    [USER],
    [SYSTEM, USER, ANSWER, USER],
    [USER, THOUGHTS, USER],
    [SYSTEM, USER, CALL, TOOL, TOOL],
    [USER, CALL, TOOL, THOUGHTS, USER],
]


def check(name: str, where: str = "[gateway]") -> None:
    """Raises ConfigError for a renderer that there is not. `where`: the section of the settings that names it."""
    if name not in ("auto", "template") and not has_renderer(name):
        raise ConfigError(
            f"{where} renderer {name!r} is not supported: use auto, template or one of "
            + ", ".join(sorted(set(MODEL_RENDERER_MAP.values())))
        )


def choose(
    folder: Path,
    name: str,
    *,
    tokenizer_hash: str | None = None,
    template_hash: str | None = None,
    as_of: datetime | None = None,
) -> Renderer:
    """The renderer `name` of the model in `folder`. as_of: the moment that a form which says the time is written as of,
    None: the present. Raises ConfigError for one that does not fit it."""
    check(name)
    tokenizer = ChatTokenizer(folder, as_of=as_of)
    template = TemplateRenderer(tokenizer, tokenizer_hash=tokenizer_hash, template_hash=template_hash)
    family = _family(folder) if name == "auto" else name
    if name == "template" or family is None:
        return template
    try:
        renderer = PackagedRenderer(
            tokenizer,
            family,
            tokenizer_hash=template.tokenizer_hash,
            template_hash=template.template_hash,
            template=template,
        )
    except ConfigError as error:
        if name != "auto":
            raise
        logger.warning("rendering by the model's own template: %s", error)
        return template
    if name == "auto" and (differs := _differs(renderer, template)):
        logger.warning("rendering by the model's own template, not by renderer %r, which %s", family, differs)
        return template
    return renderer


def _family(folder: Path) -> str | None:
    """The family by the model's name, else by its type; None when the package does not know it."""
    said = [_json(folder / "config.json"), _json(folder / "tokenizer_config.json")]
    names = [str(found.get(key, "")) for found in said for key in ("_name_or_path", "name_or_path")]
    found = next((MODEL_RENDERER_MAP[name] for name in names if name in MODEL_RENDERER_MAP), None)
    return found or TYPES.get(str(said[0].get("model_type")))


def _json(path: Path) -> JsonObject:
    settings: JsonObject = json.loads(path.read_bytes()) if path.is_file() else {}
    return settings


def _differs(renderer: PackagedRenderer, template: TemplateRenderer) -> str | None:
    """What the package does otherwise than the template; None where it writes the very same. It may write more: a
    conversation that the template refuses says nothing."""
    for probe, tools in product(PROBES, (None, TOOLS)):
        roles = ", ".join(message["role"] for message in probe) + (" with tools" if tools else "")
        try:
            want = template.render(probe, tools)
        except RenderError:
            continue
        try:
            if renderer.render(probe, tools) != want:
                return f"writes {roles} otherwise"
        except RenderError as error:
            return f"refuses {roles}: {error}"
    return None
