"""The pages of docs/algorithms, made from the presets, the knobs and the equations beside the code, so that they cannot
differ from what runs: `python -m trainers.algorithms.pages docs/algorithms` writes them."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any

from trainers.algorithms.knobs import Knobs
from trainers.algorithms.names import GONE, RENAMED
from trainers.algorithms.normalisation import Norm
from trainers.algorithms.presets import PRESETS, Preset
from trainers.algorithms.registry import OTHERS
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


@dataclass(frozen=True)
class Other:
    """An algorithm that is no preset: its family, what it is, when to use it, the modules with its equations."""

    family: str
    about: str
    when: str
    modules: tuple[str, ...]


OTHER = {
    "dpo": Other(
        "preferences",
        "Raises the chosen reply over the rejected one, against a frozen reference.",
        "Preference data.",
        ("pairs", "dpo"),
    ),
    "ipo": Other(
        "preferences",
        "The same as DPO with a margin to reach instead of one to widen.",
        "Few or noiseless preferences.",
        ("pairs", "dpo"),
    ),
    "reward-model": Other(
        "preferences",
        "A scalar head that scores the chosen reply higher.",
        "A reward for what no verifier judges.",
        ("pairs", "reward_model"),
    ),
    "distill-forward": Other(
        "distillation", "Covers all that the teacher may say.", "Samples that the teacher drew.", ("distill",)
    ),
    "distill-reverse": Other(
        "distillation", "Seeks what the teacher would say most.", "Samples that the student drew.", ("distill",)
    ),
    "sft": Other(
        "supervised",
        "Next-token cross-entropy on the trainable tokens.",
        "A warm start, or demonstrations.",
        ("sft",),
    ),
}


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
    made = {f"{name}.md": _page(name) for name in (*PRESETS, *OTHER)}
    return {INDEX: _index(), "knobs.md": _knobs(), **made}


def knob_comments() -> list[tuple[str, str, str, str]]:
    """(section, name, default as written, meaning) of every knob, in order."""
    out, section = [], ""
    for line in inspect.getsource(Knobs).splitlines():
        if head := re.fullmatch(r" +# -+ (.+)", line):
            section = head[1]
        elif found := re.fullmatch(r"    (\w+): .+ = (\S+)  # (.+)", line):
            out.append((section, found[1], found[2].strip('"'), found[3]))
    return out


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
    told: dict[str, Preset | Other] = {**PRESETS, **OTHER}
    return [(name, one.about, one.when) for name, one in told.items() if one.family == family]


def _page(name: str) -> str:
    told: Preset | Other
    if name in PRESETS:
        told = PRESETS[name]
        knobs = dict(told.knobs)
        used, heading = modules(Knobs(**knobs)), "Sets, beyond [the defaults](knobs.md):"
    else:
        told = OTHER[name]
        kind, preset = OTHERS[name]
        knobs = {field.name: field.default for field in fields(kind)} | preset
        used, heading = list(told.modules), "Knobs:"
    parts = [
        f"# {name}",
        "",
        told.about,
        "",
        f"When: {told.when}",
        "",
        f"![{name} learns to sort]({CURVES}/{name}.svg)",
    ]
    parts += ["", heading, "", *[f"- `{knob} = {_shown(value)}`" for knob, value in knobs.items()], ""]
    parts += ["## Equations", ""]
    for module in used:
        doc = inspect.getdoc(import_module(f"trainers.algorithms.{module}")) or ""
        parts += [f"`trainers/algorithms/{module}.py`", "", "```text", textwrap.dedent(doc).strip(), "```", ""]
    return "\n".join(parts)


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
    parts += [f"| `{gone}` | refused: {instead} |" for gone, instead in GONE.items()]
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
