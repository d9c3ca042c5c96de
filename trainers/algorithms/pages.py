"""The pages of docs/algorithms, made from the presets, the knobs and the equations beside the code, so that they cannot
differ from what runs: `python -m trainers.algorithms.pages docs/algorithms` writes them."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

from trainers.algorithms.equations import SYMBOLS, Equation
from trainers.algorithms.knobs import Knobs
from trainers.algorithms.names import GONE, RENAMED, SWITCHES, VALUES
from trainers.algorithms.normalisation import Norm
from trainers.algorithms.others import OTHERS, Other
from trainers.algorithms.presets import PRESETS, Preset
from trainers.algorithms.repair import Rejection

INDEX = "README.md"
AS_WRITTEN = {"None": "none", "math.inf": "inf", "False": "false", "True": "true"}
"""What Python writes -> what a configuration writes."""


CURVES = "curves"
"""Folder of the pictures that `benchmarks.study_algorithms --plot` draws."""

FAMILIES = {
    "advantages": "Advantages from rewards, without a critic",
    "ratios": "Other uses of the ratio of new to old policy",
    "critic": "With a critic",
    "off-policy": "Stale and mismatched samples",
    "preferences": "Preferences and reward models",
    "distillation": "Distillation",
    "supervised": "Supervised fine-tuning",
}
"""What presets name as their family -> the heading of its algorithms."""


def modules(knobs: Knobs) -> list[str]:
    """The modules whose equations an algorithm with these knobs follows, in the order of the computation."""
    used = {
        "rewards": knobs.reward_model_coef > 0,
        "normalisation": knobs.reward_norm is not None or knobs.advantage_norm is not None,
        "kl": knobs.needs_reference,
        "advantages": True,
        "masks": knobs.m2_threshold is not None,
        "proximal": knobs.decoupled,
        "policy_loss": True,
        "repair": knobs.rejection is not None,
        "distill": knobs.teacher_coef > 0,
        "aggregation": True,
        "value_loss": knobs.critic,
    }
    return [name for name, does in used.items() if does]


def pages() -> dict[str, str]:
    """File name -> content."""
    made = {f"{name}.md": _page(name) for name in (*PRESETS, *OTHERS)}
    return {INDEX: _index(), "knobs.md": _knobs(), **made}


def knob_comments(kind: type[Any] = Knobs) -> list[tuple[str, str, str, str]]:
    """(section, name, default as written, meaning) of every knob of an algorithm's class, in order."""
    out, section = [], ""
    for line in inspect.getsource(kind).splitlines():
        if head := re.fullmatch(r" +# -+ (.+)", line):
            section = head[1]
        elif found := re.fullmatch(r"    (\w+): .+ = (\S+)  # (.+)", line):
            out.append((section, found[1], found[2].strip('"'), found[3]))
        elif more := re.fullmatch(r"    # (.+)", line):
            out[-1] = (*out[-1][:3], f"{out[-1][3]} {more[1]}")
    return out


def block(equation: Equation) -> str:
    """An equation as pages show it: terms and notes each in a column."""
    terms = max(len(line.term) for line in equation)
    texts = max((len(line.text) for line in equation if line.note), default=0)
    told = [(f"{line.term:<{terms}} = {line.text:<{texts}}", line.note) for line in equation]
    return "\n".join(f"{text}   {note}".rstrip() for text, note in told)


def _index() -> str:
    parts = [
        "# Algorithms",
        "",
        "`[learner] algorithm` names one, `[learner] knobs` overrides what it sets; in Python it is",
        '`trainers.algorithms.registry.algorithm("dapo", clip_high=0.3)`. All knobs: [knobs.md](knobs.md).',
        "",
    ]
    for family, title in FAMILIES.items():
        parts += ["", f"## {title}", "", "| algorithm | what it is | when |", "| --- | --- | --- |"]
        parts += [f"| [`{name}`]({name}.md) | {about} | {when} |" for name, about, when in _rows(family)]
    return "\n".join(parts) + "\n"


def _rows(family: str) -> list[tuple[str, str, str]]:
    told: dict[str, Preset | Other] = {**PRESETS, **OTHERS}
    return [(name, one.about, one.when) for name, one in told.items() if one.family == family]


def _page(name: str) -> str:
    told: Preset | Other
    kind: type[Any]
    if name in PRESETS:
        told, kind = PRESETS[name], Knobs
        every, knobs = _every(kind, told.knobs), dict(told.knobs)
        used, heading = modules(Knobs(**knobs)), "Sets, beyond [the defaults](knobs.md):"
    else:
        told, kind = OTHERS[name], OTHERS[name].kind
        every = knobs = _every(kind, told.knobs)
        used, heading = list(told.modules), "Knobs:"
    parts = [
        f"# {name}",
        "",
        told.about,
        "",
        f"When: {told.when}",
        "",
        "## What it minimises",
        "",
        "```text",
        block(told.equation),
        "```",
        "",
        *_symbols(told.equation),
        "",
        heading,
        "",
        *[f"- `{knob} = {_shown(value)}`" for knob, value in knobs.items()],
        "",
        "Which knobs turn which terms:",
        "",
        *_turned(told.equation, kind, every),
        "",
        f"![`{name}` on the sort task]({CURVES}/{name}.svg)",
        "",
        "## The parts it is made of",
        "",
        "Algorithms share them, so they also hold what this one leaves out.",
        "",
    ]
    for module in used:
        doc = inspect.getdoc(import_module(f"trainers.algorithms.{module}")) or ""
        parts += [f"`trainers/algorithms/{module}.py`", "", "```text", textwrap.dedent(doc).strip(), "```", ""]
    return "\n".join(parts)


def _every(kind: type[Any], knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Every knob of an algorithm: what it sets, and the defaults of the rest."""
    return {field.name: field.default for field in fields(kind)} | dict(knobs)


def _symbols(equation: Equation) -> list[str]:
    """What the symbols of an equation mean."""
    words = set(re.findall(r"\w+", " ".join(f"{line.term} {line.text} {line.note}" for line in equation)))
    shown = ((", ".join(f"`{s}`" for s in keys.split(", ") if s in words), told) for keys, told in SYMBOLS.items())
    return [f"- {names}: {told}" for names, told in shown if names]


def _turned(equation: Equation, kind: type[Any], knobs: Mapping[str, Any]) -> list[str]:
    """Which knobs turn which terms."""
    turned: dict[str, list[str]] = {}
    for line in equation:
        for knob in line.knobs:
            terms = turned.setdefault(knob, [])
            terms += [] if line.term in terms else [line.term]
    means = {name: meaning for _, name, _, meaning in knob_comments(kind)}
    rows = [
        f"| {', '.join(f'`{term}`' for term in terms)} | `{knob} = {_shown(knobs[knob])}` | {means[knob]} |"
        for knob, terms in turned.items()
    ]
    return ["| term | turned by | which is |", "| --- | --- | --- |", *rows]


def _knobs() -> str:
    parts = [
        "# Knobs of the policy-gradient family",
        "",
        "Defaults are those without a preset. Numbers that may be left out take `none`; a normalisation is",
        '`"mean/std"` such as `"group/batch"`, a table, or `"none"`.',
        "",
    ]
    last = ""
    for section, name, default, meaning in knob_comments():
        if section != last:
            parts += ["", f"## {section.capitalize()}", "", "| knob | default | what it does |", "| --- | --- | --- |"]
            last = section
        parts.append(f"| `{name}` | `{AS_WRITTEN.get(default, default)}` | {meaning} |")
    parts += ["", "## Names of other frameworks", "", "| theirs | here |", "| --- | --- |"]
    parts += [f"| `{theirs}` | `{ours}` |" for theirs, ours in RENAMED.items()]
    parts += [
        f"| `{theirs} = {_shown(sets)}` | `{ours} = {_shown(meant)}` |"
        for theirs, (sets, ours, meant) in SWITCHES.items()
    ]
    parts += [
        f'| `{ours} = "{theirs}"` | `{ours} = "{meant}"` |'
        for ours, values in VALUES.items()
        for theirs, meant in values.items()
    ]
    parts += [f"| `{gone}` | refused: {instead} |" for gone, instead in GONE.items()]
    parts += ["", 'Without `eps_clip_higher`, `eps_clip` is the clip to both sides: it sets `clip_high = "none"`.']
    return "\n".join(parts) + "\n"


def _shown(value: Any) -> str:
    """As a configuration writes it: what differs from the defaults of its kind, of a table."""
    match value:
        case None:
            return '"none"'
        case bool():
            return str(value).lower()
        case Norm() | Rejection():
            plain = type(value)()
            told = {f.name: getattr(value, f.name) for f in fields(value)}
            rest = [n for n, v in told.items() if v != getattr(plain, n) and not n.endswith("_level")]
            if isinstance(value, Norm) and not rest:
                return f'"{value.mean_level or "none"}/{value.std_level or "none"}"'
            shown = [n for n in told if n in rest or n.endswith("_level") or isinstance(value, Rejection)]
            return "{ " + ", ".join(f"{n} = {_shown(told[n])}" for n in shown if n != "lower" or told[n]) + " }"
        case str():
            return f'"{value}"'
        case _:
            return str(value)


def main(folder: Path) -> None:
    """Writes every page."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in pages().items():
        (folder / name).write_text(content)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
