"""One `millrace.toml`, overridden by environment, overridden by flags."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from millrace.infra.config.problems import check_names, explain
from millrace.infra.config.settings import PREFIX, Settings
from millrace.infra.config.wire import flat
from millrace.infra.errors import ConfigError

FILE = "millrace.toml"


def load(file: Path | None = None, flags: Mapping[str, object] | None = None) -> Settings:
    """The effective settings. `file` must exist when named (here or by MILLRACE_CONFIG); else ./millrace.toml may be
    missing. `flags` maps dotted keys ("gateway.port") to values and wins over the environment, which wins over the
    file.

    Raises ConfigError with one line for each thing that is wrong."""
    choice = file or (Path(os.environ[f"{PREFIX}CONFIG"]) if os.environ.get(f"{PREFIX}CONFIG") else None)
    path = choice or Path(FILE)
    data: dict[str, Any] = {}
    if _is_there(path):
        try:
            data = tomllib.loads(path.read_text())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not TOML: {error}{_twice(path)}") from None
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    elif choice:
        raise ConfigError(f"there is no {path}: `millrace init` writes one")
    check_names(os.environ)
    environment, texts = _environment(os.environ)
    data = merge(_anchor(data, path.absolute().parent), environment)
    for key, value in (flags or {}).items():
        data = merge(data, _table_of(key.split("."), value))
    try:
        return Settings(**data)
    except ValidationError as error:
        problems = [{**problem, "msg": problem["msg"] + texts.get(problem["loc"], "")} for problem in error.errors()]
        raise ConfigError("\n".join(explain(problems))) from None


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError) as error:  # a name that no file can have, a folder that is not ours to look into
        raise ConfigError(f"{str(path)[:80]!r} cannot be read: {error}") from None


def _twice(path: Path) -> str:
    """What to do about headings that stand in a file twice, as they do where something was pasted under it."""
    lines: dict[str, list[int]] = {}
    for number, line in enumerate(path.read_bytes().decode(errors="replace").splitlines(), 1):
        heading = line.partition("#")[0].strip()
        if heading.startswith("[") and heading.endswith("]") and not heading.startswith("[["):
            lines.setdefault(heading, []).append(number)
    return "".join(
        f"\n{heading} stands in lines {' and '.join(map(str, numbers))}: keep the first, and move what is under the "
        "others to it"
        for heading, numbers in lines.items()
        if len(numbers) > 1
    )


def _environment(variables: Mapping[str, str]) -> tuple[dict[str, object], dict[tuple[str | int, ...], str]]:
    """The settings among these variables, and of texts that begin like a table or a list and are none (a password may)
    what to add where one of those was wanted. A key of a table wins over the variable that holds the table."""
    out: dict[str, object] = {}
    texts: dict[tuple[str | int, ...], str] = {}
    for name in sorted(variables, key=lambda name: name.count("__")):
        keys = name.lower().removeprefix(PREFIX.lower()).split("__")
        if name.upper().startswith(PREFIX) and keys[0] in Settings.model_fields:
            try:
                value = _table_of(keys, variables[name])
            except ConfigError:
                value = {keys[-1]: variables[name]}
                for key in reversed(keys[:-1]):
                    value = {key: value}
                texts[tuple(keys)] = f": {name} is not JSON, as which tables and lists are given"
            out = merge(out, value)
    return out, texts


def variables(flags: Mapping[str, object]) -> dict[str, str]:
    """The environment that says the same as these flags, for processes that are started with it."""
    return {
        PREFIX + key.upper().replace(".", "__"): value if isinstance(value, str) else json.dumps(value)
        for key, value in flags.items()
    }


def merge(low: Mapping[str, object], high: Mapping[str, object]) -> dict[str, Any]:
    """Tables are merged, everything else of `high` replaces that of `low`."""
    out = dict(low)
    for key, value in high.items():
        lower = out.get(key)
        out[key] = merge(lower, value) if isinstance(lower, Mapping) and isinstance(value, Mapping) else value
    return out


def _table_of(keys: list[str], value: object) -> dict[str, object]:
    """A flag as a table. Text that begins like a JSON table or list is one, as in the environment."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{'.'.join(keys)} is not JSON: {error}") from None
    for key in reversed(keys[1:]):
        value = {key: value}
    return {keys[0]: value}


def _anchor(data: dict[str, object], folder: Path) -> dict[str, object]:
    """Relative paths in the file begin where the file lies, so that every command finds the same places."""
    out = merge({"home": ".millrace"}, data)
    kafka = out.get("kafka")
    if isinstance(kafka, dict) and isinstance(options := kafka.get("options"), Mapping):
        kafka["options"] = options = flat(options)
        files = [key for key in options if key.endswith((".location", ".keytab")) and options[key] != "probe"]
    else:
        files, options = [], {}
    reward = out.get("reward")
    judge = reward.get("judge") if isinstance(reward, dict) else None
    for table, key in (
        (out, "home"),
        (out, "objects"),
        (out.get("gateway"), "capture_dir"),
        (out.get("rollout"), "tasks"),
        (out.get("engine"), "cache"),
        *((options, file) for file in files),
        (kafka, "key_file"),
        (out.get("learner"), "reference"),
        (out.get("learner"), "teacher"),
        (out.get("learner"), "reward_model"),
        (judge, "rubric"),
    ):
        if isinstance(table, dict) and isinstance(path := table.get(key), str) and path and "://" not in path:
            table[key] = str(folder / path)
    return out
