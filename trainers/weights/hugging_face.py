"""What public model directories hold otherwise than versions do, weights aside (`conversion.py`), and how it becomes a
version's.

Chat templates. A version's files lie in no folder: a directory with `additional_chat_templates/` gives the same
templates under the same names in its tokenizer's settings, where transformers and the gateway read them too; a
directory of one template keeps its file.

Output matrix. A model that shares it with its input embeddings gets one of its own where its head alone shall change.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from millrace.trainers.errors import CheckpointError
from millrace.trainers.weights.state import State

_TEMPLATES_FOLDER = "additional_chat_templates"
_DEFAULT_TEMPLATE = "chat_template.jinja"
_TOKENIZER = "tokenizer_config.json"


def flatten_templates(directory: Path, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files of a version that starts from `directory`, whose own plain files are `files`."""
    templates = {path.stem: path.read_text() for path in sorted((directory / _TEMPLATES_FOLDER).glob("*.jinja"))}
    if not templates:
        return dict(files)
    out = dict(files)
    default = out.pop(_DEFAULT_TEMPLATE, None)
    if default is not None:
        templates = {"default": default.decode(), **templates}
    settings = json.loads(out.get(_TOKENIZER, b"{}"))
    settings["chat_template"] = [{"name": name, "template": template} for name, template in templates.items()]
    out[_TOKENIZER] = (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()
    return out


_EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"


def untie(state: State) -> State:
    """The same model, step for step the same numbers at first; what has a head of its own already is as it was. Raises
    CheckpointError where its input embeddings are not found."""
    settings = json.loads(state.assets["config.json"])
    if OUTPUT in state.weights and not settings.get("tie_word_embeddings"):
        return state
    names = [name for name in state.weights if name.endswith(_EMBEDDING)]
    if len(names) != 1:
        raise CheckpointError(f"{len(names)} of its weights end in {_EMBEDDING}: untie this model by its own means")
    settings["tie_word_embeddings"] = False
    assets = {**state.assets, "config.json": (json.dumps(settings, indent=2) + "\n").encode()}
    return replace(
        state, weights={**state.weights, OUTPUT: state.weights[names[0]].clone()}, assets=assets, source=None
    )
