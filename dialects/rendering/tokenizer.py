"""A Hugging Face tokenizer directory without transformers: `tokenizers` for the ids, jinja2 for the chat template.

transformers would cost a second and its memory in every gateway; the template environment here is the one that
transformers compiles templates in, compared with it in the tests. The object also has the surface that `renderers`
asks of a tokenizer."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import orjson
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from millrace.dialects.rendering.base import RenderError
from millrace.dialects.rendering.segments import Segments
from millrace.infra.errors import ConfigError
from millrace.schemas.json_values import Json

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""a byte in the vocabulary of a tokenizer that falls back to bytes"""
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + at): byte for at, byte in enumerate(sorted({*range(256)} - {*_PRINTABLE}))
}
"""the byte of each letter in the vocabulary of a byte-level tokenizer (GPT-2's table)"""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the model writes; for rendering it is transparent."""

    def __init__(self, environment: jinja2.Environment) -> None:
        self.tags = {"generation"}
        super().__init__(environment)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise RenderError(f"the chat template refuses these messages: {message}")


def variables(source: str) -> frozenset[str]:
    """The names that a template looks up."""
    return frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(source)))


def compile_template(source: str) -> Callable[..., str]:
    """A function of the template's variables that gives text."""
    return _environment().from_string(source).render


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _templates(folder: Path, config: Mapping[str, Json]) -> dict[str, str]:
    """The chat templates of a model by name, as transformers finds them: `tool_use`, where there is one, writes the
    conversations that offer tools, and `default` all others."""
    file = folder / "chat_template.jinja"
    templates = {"default": file.read_text()} if file.is_file() else {}
    templates |= {
        path.stem: path.read_text() for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    if templates:
        return templates
    setting = config.get("chat_template")
    if isinstance(setting, list):
        return {entry["name"]: entry["template"] for entry in setting}
    return {"default": setting} if isinstance(setting, str) else {}


class ChatTokenizer:
    """Load `folder`. as_of: the moment that templates are told, None: the present. Raises ConfigError when it has no
    tokenizer or no chat template."""

    def __init__(self, folder: Path, *, as_of: datetime | None = None) -> None:
        self.name_or_path = str(folder)
        self.as_of = as_of
        core, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
        if not core.is_file():
            raise ConfigError(f"{folder} has no tokenizer.json: point the gateway at the model's directory")
        self.core = Tokenizer.from_file(str(core))
        config = json.loads(settings.read_bytes()) if settings.is_file() else {}
        self._specials = {
            name: token["content"] if isinstance(token, dict) else token
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if (token := config.get(name)) is not None
        }
        by_name = _templates(folder, config)
        source = by_name.get("default")
        if source is None:
            raise ConfigError(f"{folder} has no chat template: add chat_template.jinja to the model's directory")
        self.template = source
        self._render = compile_template(source)
        self._render_tools = compile_template(by_name["tool_use"]) if "tool_use" in by_name else self._render
        self.names = variables(source) | variables(by_name.get("tool_use", ""))
        """what the templates look up"""
        self.eos_token = self._specials.get("eos_token")
        self.eos_token_id = self._id(self.eos_token)
        self.unk_token_id = self._id(self._specials.get("unk_token"))
        self.stop_ids = self._stop_ids(folder / "generation_config.json")
        self.special_ids = frozenset(id for id, token in self.core.get_added_tokens_decoder().items() if token.special)
        self.all_special_tokens = [self.core.id_to_token(id) for id in sorted(self.special_ids)]
        self._texts: dict[int, str] = {}
        content = core.read_bytes()
        self.segments = Segments(self.core, orjson.loads(content))
        self.hash = hashlib.sha256(content).hexdigest()
        entries = [{"name": name, "template": template} for name, template in by_name.items()]
        templates = source if len(by_name) == 1 else json.dumps(entries, sort_keys=True)
        self.template_hash = hashlib.sha256(templates.encode()).hexdigest()

    def render_text(
        self, messages: Sequence[Json], tools: object, *, generate: bool, now: datetime | None = None, **kwargs: Any
    ) -> str:
        """The conversation as text, as of `as_of` or else `now` where the template says the time. Raises RenderError
        when the template cannot write it."""
        render = self._render if tools is None else self._render_tools
        if (moment := self.as_of or now) is not None:
            kwargs["strftime_now"] = moment.strftime
        try:
            return render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=generate,
                **self._specials,
                **kwargs,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            raise RenderError(f"the chat template cannot render these messages: {error}") from error

    def encode(self, text: str, add_special_tokens: bool = False, **_: object) -> list[int]:
        """Token ids of text; special tokens written in it are recognised, none are added unless asked for.

        Raises PromptTooLong, RenderError."""
        try:
            if not add_special_tokens:
                return self.segments.encode(text)
            ids: list[int] = self.core.encode(text, add_special_tokens=True).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise RenderError(
                "half of a surrogate pair, in the JSON of a tool call's arguments, is no character: send both halves, "
                "or U+FFFD instead"
            ) from error
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False, **_: object) -> str:
        """Text of token ids."""
        return self.core.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def decode_whole(self, ids: Sequence[int]) -> str:
        """Text of token ids that may be a client's. Raises RenderError for one that there is not."""
        if ids and max(ids) >= self.core.get_vocab_size():
            raise RenderError(f"the model has no token {max(ids)}")
        return self.decode(ids)

    def text(self, token: int) -> str:
        """Text of one token, kept for the next time."""
        piece = self._texts.get(token)
        if piece is None:
            piece = self._texts[token] = self.decode([token])
        return piece

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for, which need not be whole characters."""
        text = self.text(token)
        if "\N{REPLACEMENT CHARACTER}" not in text:
            return text.encode()
        piece = self.core.id_to_token(token) or ""
        if byte := _BYTE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        if piece and all(letter in _BYTE_OF for letter in piece):
            return bytes(_BYTE_OF[letter] for letter in piece)
        return text.encode()

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> Any:
        """Ids of whole tokens; None where there is no such token."""
        if isinstance(tokens, str):
            return self.core.token_to_id(tokens)
        return [self.core.token_to_id(token) for token in tokens]

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self.core.token_to_id(token)

    def _stop_ids(self, generation: Path) -> frozenset[int]:
        setting = json.loads(generation.read_bytes()).get("eos_token_id") if generation.is_file() else None
        many = setting if isinstance(setting, list) else [setting]
        return frozenset(id for id in (self.eos_token_id, *many) if isinstance(id, int))
