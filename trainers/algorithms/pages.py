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
from trainers.algorithms.presets import PRESETS
from trainers.algorithms.registry import OTHERS
from trainers.algorithms.repair import Rejection

INDEX = "README.md"
AS_WRITTEN = {"None": "none", "math.inf": "inf", "False": "false", "True": "true"}
"""What Python writes -> what a configuration writes."""


@dataclass(frozen=True)
class Family:
    """A page. title; about: one sentence; modules: whose docstrings hold the equations; others: algorithms that are no
    presets, (name, what it is, when to use it)."""

    title: str
    about: str
    modules: tuple[str, ...]
    others: tuple[tuple[str, str, str], ...] = ()


FAMILIES = {
    "advantages": Family(
        "Advantages from rewards",
        "No critic: a reply is worth its reward, compared with its group or its batch.",
        ("advantages", "normalisation", "policy_loss", "aggregation"),
    ),
    "ratios": Family(
        "Other uses of the ratio",
        "The advantages of GRPO; what differs is how the ratio of new to old policy enters the loss.",
        ("policy_loss",),
    ),
    "critic": Family(
        "With a critic",
        "A value model learns beside the policy, in the same process group and the same checkpoint.",
        ("advantages", "value_loss"),
    ),
    "off-policy": Family(
        "Stale and mismatched samples",
        "Samples that another policy drew: older weights, or an engine whose numbers differ from the trainer's.",
        ("proximal", "repair", "masks"),
    ),
    "preferences": Family(
        "Preferences and reward models",
        "Pairs of replies to one prompt, of which one was chosen: two trajectories of a group whose rewards differ.",
        ("pairs", "dpo", "reward_model"),
        (
            ("dpo", "Raises the chosen reply over the rejected one, against a frozen reference.", "Preference data."),
            ("ipo", "The same with a margin to reach instead of one to widen.", "Few or noiseless preferences."),
            (
                "reward-model",
                "A scalar head that scores the chosen reply higher.",
                "A reward for what no verifier judges.",
            ),
        ),
    ),
    "distillation": Family(
        "Distillation",
        "A teacher of the same vocabulary shows the distribution to learn.",
        ("distill",),
        (
            ("distill-forward", "Covers all that the teacher may say.", "Samples that the teacher drew."),
            ("distill-reverse", "Seeks what the teacher would say most.", "Samples that the student drew."),
        ),
    ),
    "supervised": Family(
        "Supervised fine-tuning",
        "Learns to say what the samples say.",
        ("sft",),
        (("sft", "Next-token cross-entropy on the trainable tokens.", "A warm start, or demonstrations."),),
    ),
}


def pages() -> dict[str, str]:
    """File name -> content."""
    return {INDEX: _index(), "knobs.md": _knobs(), **{f"{name}.md": _page(name) for name in FAMILIES}}


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
        "| algorithm | what it is | page |",
        "| --- | --- | --- |",
    ]
    for name, family in FAMILIES.items():
        for row in _rows(name):
            parts.append(f"| `{row[0]}` | {row[1]} | [{family.title}]({name}.md) |")
    return "\n".join(parts) + "\n"


def _rows(family: str) -> list[tuple[str, str, str]]:
    presets = [(name, preset.about, preset.when) for name, preset in PRESETS.items() if preset.family == family]
    return presets + list(FAMILIES[family].others)


def _page(name: str) -> str:
    family = FAMILIES[name]
    parts = [f"# {family.title}", "", family.about, ""]
    for algorithm, about, when in _rows(name):
        parts += [f"## {algorithm}", "", about, "", f"When: {when}", ""]
        if algorithm in PRESETS:
            knobs = PRESETS[algorithm].knobs
            parts += ["Sets:", "", *[f"- `{knob} = {_shown(value)}`" for knob, value in knobs.items()], ""]
        else:
            kind, preset = OTHERS[algorithm]
            defaults = {field.name: field.default for field in fields(kind)} | preset
            parts += ["Knobs:", "", *[f"- `{knob} = {_shown(value)}`" for knob, value in defaults.items()], ""]
    parts += ["## Equations", ""]
    for module in family.modules:
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
