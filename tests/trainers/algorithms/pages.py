"""The pages of docs/algorithms, made from the presets, the knobs and the equations of `table.py`, so that they cannot
differ from what runs: `python -m tests.trainers.algorithms.pages docs/algorithms` writes them."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

from millrace.trainers.algorithms.knobs import Knobs
from millrace.trainers.algorithms.names import GONE, NEW_NAMES, SWITCHES, VALUES
from millrace.trainers.algorithms.normalisation import Norm
from millrace.trainers.algorithms.presets import PRESETS
from millrace.trainers.algorithms.registry import OTHERS
from millrace.trainers.algorithms.repair import Rejection
from tests.trainers.algorithms.equations import SYMBOLS, Equation
from tests.trainers.algorithms.papers import sources
from tests.trainers.algorithms.table import PAGES

INDEX = "README.md"
AS_WRITTEN = {"None": "none", "math.inf": "inf", "False": "false", "True": "true"}
"""What Python writes -> what a configuration writes."""


WRITTEN = ("adding.md",)
"""Pages of the folder that are written by hand."""
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
"""The family of an algorithm -> the heading of its algorithms."""


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
    return {INDEX: _index(), "knobs.md": _knobs(), "shared.md": _shared(), **made}


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
        '`millrace.trainers.algorithms.registry.algorithm("dapo", clip_high=0.3)`. All knobs: [knobs.md](knobs.md);',
        "symbols and parts: [shared.md](shared.md). How to add one: [adding.md](adding.md).",
        "",
    ]
    for family, title in FAMILIES.items():
        parts += ["", f"## {title}", "", "| algorithm | what it is | when |", "| --- | --- | --- |"]
        parts += [f"| [`{name}`]({name}.md) | {about} | {when} |" for name, about, when in _rows(family)]
    return "\n".join(parts) + "\n"


def _rows(family: str) -> list[tuple[str, str, str]]:
    about = {name: entry.about for table in (PRESETS, OTHERS) for name, entry in table.items()}
    return [(name, about[name], PAGES[name].when) for name in about if PAGES[name].family == family]


def _page(name: str) -> str:
    page = PAGES[name]
    if name in PRESETS:
        about, knobs = PRESETS[name].about, dict(PRESETS[name].knobs)
        used, heading = modules(Knobs(**knobs)), "Sets, beyond [the defaults](knobs.md):"
    else:
        other = OTHERS[name]
        used, heading = list(page.modules), "Knobs, each with its meaning in [shared.md](shared.md#other-knobs):"
        about, knobs = other.about, {field.name: field.default for field in fields(other.kind)} | dict(other.knobs)
    parts = [
        f"# {name}",
        "",
        about,
        "",
        f"When: {page.when}",
        "",
        *sources(name),
        "## What it minimises",
        "",
        "```text",
        block(page.equation),
        "```",
        "",
        "[The symbols](shared.md#symbols)",
        "",
        heading,
        "",
        *[f"- `{knob} = {_shown(value)}`" for knob, value in knobs.items()],
        "",
        *_turned(page.equation),
        "",
        f"![`{name}` on the sort task]({CURVES}/{name}.svg)",
        "",
        f"Made of: {', '.join(f'[{module}](shared.md#{module})' for module in used)}",
        "",
    ]
    return "\n".join(parts)


def _shared() -> str:
    """What algorithms have in common: symbols, knobs of those outside the family, parts."""
    used = dict.fromkeys(name for knobs in _uses() for name in knobs)
    kinds = {other.kind.__name__: other.kind for other in OTHERS.values()}
    parts = [
        "# What algorithms share",
        "",
        "Pages of algorithms show what each of them minimises and sets; this is what they have in common. The knobs of",
        "the policy-gradient family are in [knobs.md](knobs.md).",
        "",
        "## Symbols",
        "",
        *[f"- {', '.join(f'`{one}`' for one in names.split(', '))}: {told}" for names, told in SYMBOLS.items()],
        "",
        "## Other knobs",
        "",
        "| algorithms | knob | default | what it does |",
        "| --- | --- | --- | --- |",
        *[
            f"| {kind} | `{name}` | `{AS_WRITTEN.get(default, default)}` | {meaning} |"
            for kind, made in kinds.items()
            for _, name, default, meaning in knob_comments(made)
        ],
        "",
    ]
    for module in used:
        doc = inspect.getdoc(import_module(f"millrace.trainers.algorithms.{module}")) or ""
        where = f"`trainers/algorithms/{module}.py`"
        parts += [f"## {module}", "", where, "", "```text", textwrap.dedent(doc).strip(), "```", ""]
    return "\n".join(parts)


def _uses() -> list[list[str]]:
    return [
        *(modules(Knobs(**preset.knobs)) for preset in PRESETS.values()),
        *(list(PAGES[name].modules) for name in OTHERS),
        ["rewards", "kl"],
    ]


def _turned(equation: Equation) -> list[str]:
    """Which knobs turn which terms."""
    turned: dict[str, dict[str, None]] = {}
    for line in equation:
        if line.knobs:
            turned.setdefault(line.term, {}).update(dict.fromkeys(line.knobs))
    rows = [f"| `{term}` | {', '.join(f'`{knob}`' for knob in knobs)} |" for term, knobs in turned.items()]
    return ["| term | is turned by |", "| --- | --- |", *rows]


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
    parts += [f"| `{theirs}` | `{ours}` |" for theirs, ours in NEW_NAMES.items()]
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
            return (
                "{ "
                + ", ".join(f"{n} = {_shown(told[n])}" for n in shown if told[n] is not None or n.endswith("_level"))
                + " }"
            )
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
