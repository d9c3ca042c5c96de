"""Options of the commands that train, made from the fields of `millrace.trainers.offline.job.Job`: a field says an
option's name, type, default, bounds and help."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typing_extensions import Doc

from millrace.infra.errors import ConfigError
from millrace.schemas.json_values import Json, JsonObject
from millrace.trainers.offline.job import Bounds, Job

MODEL: Mapping[str, bool] = {"exists": True, "file_okay": False}
DETAILS: Mapping[str, Mapping[str, Any]] = {
    "model": MODEL,
    "reference": MODEL,
    "teacher": MODEL,
    "data": {"exists": True},
    "out": {"file_okay": False},
    "knobs": {"metavar": "KEY=VALUE"},
}
"""What only a command line says of an option."""
SPELLINGS = {"knobs": "knob", "floor": "lr-floor", "checkpointing": "activation-checkpointing"}
"""Options that have another name than their field."""
NO_DEFAULT = inspect.Parameter.empty
"""the default of an option that must be given"""


@dataclass(frozen=True, slots=True)
class RunFlags:
    """Options of a training from files that are no field of a job: the parts of its `lora`, and its trackers."""

    lora_rank: Annotated[int, Bounds(0), Doc("learn an adapter (LoRA) of this rank only; 0: all weights")] = 0
    lora_alpha: Annotated[int, Bounds(0), Doc("scale of the adapter times its rank; 0: twice the rank")] = 0
    adapter_only: Annotated[bool, Doc("write adapters alone instead of merged weights")] = False
    tracker: Annotated[list[str] | None, Doc("tensorboard, mlflow or wandb, beside the versions; may be repeated")] = (
        None
    )


_FIELDS = {
    field.name: (hint, NO_DEFAULT if field.default is MISSING else field.default)
    for owner in (Job, RunFlags)
    for field, hint in zip(fields(owner), get_type_hints(owner, include_extras=True).values(), strict=True)
}


def with_options(*names: str, **defaults: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these options, in this order. A name is of a parameter of the command itself, or of a field.
    defaults: of fields whose own default is not the command's."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(command, eval_str=True).parameters
        options = [parameters.get(name) or _option(name, defaults) for name in ("context", *names)]
        keywords = [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options]
        vars(command)["__signature__"] = inspect.Signature(keywords)
        return command

    return decorate


def _option(name: str, defaults: Mapping[str, object]) -> inspect.Parameter:
    hint, default = _FIELDS[name]
    kind, *notes = get_args(hint)
    if name == "knobs":
        kind, default = list[str] | None, None
    elif get_origin(kind) is Literal:
        kind = str  # the job refuses another word, and says which there are
    (text,) = (note.documentation for note in notes if isinstance(note, Doc))
    bounds = next((note for note in notes if isinstance(note, Bounds)), Bounds())
    spelling = f"--{SPELLINGS.get(name, name).replace('_', '-')}"
    option = typer.Option(spelling, help=text, min=bounds.least, max=bounds.most, **DETAILS.get(name, {}))
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=defaults.get(name, default),
        annotation=Annotated[kind, option],
    )


def parse_knobs(pairs: Iterable[str] | None) -> JsonObject:
    """`key=value` pairs as knobs, each value JSON or else text. Raises ConfigError for one without an equals sign."""
    return dict(_knob(pair) for pair in pairs or [])


def _knob(pair: str) -> tuple[str, Json]:
    name, equals, text = pair.partition("=")
    if not equals:
        raise ConfigError(f"--knob {pair}: write it as key=value")
    try:
        return name.strip(), json.loads(text)
    except ValueError:
        return name.strip(), text
