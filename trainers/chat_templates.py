"""Chat templates of a model directory as files of a version, which are named by plain names and lie in no folder.

Invariants: a directory of one template is left as it is; one with `additional_chat_templates/` gives the same templates
under the same names in its tokenizer's settings, where transformers and the gateway read them too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

FOLDER = "additional_chat_templates"
DEFAULT = "chat_template.jinja"
SETTINGS = "tokenizer_config.json"


def flattened(directory: Path, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files of a version that starts from `directory`, whose own plain files are `files`."""
    named = {path.stem: path.read_text() for path in sorted((directory / FOLDER).glob("*.jinja"))}
    if not named:
        return dict(files)
    out = dict(files)
    own = out.pop(DEFAULT, None)
    if own is not None:
        named = {"default": own.decode(), **named}
    settings = json.loads(out.get(SETTINGS, b"{}"))
    settings["chat_template"] = [{"name": name, "template": template} for name, template in named.items()]
    out[SETTINGS] = (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()
    return out
