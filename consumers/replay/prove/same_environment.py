"""By what a step that is trained here would differ from the one on record: each difference by name, before training.

Invariant: what changes the last bit of a step is compared: configuration, code, libraries, CPU, device, threads, and
the content of the models that a step reads beside its own. What an old entry does not say is not compared, except by
the hash that covers it. Pure, but for `here`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.consumers.learner.group.identity import NOT_TRAINING, Identity, identify
from millrace.consumers.learner.step.leader import machine
from millrace.consumers.replay.prove.plan import version_text
from millrace.consumers.replay.prove.version_history import refusing_forgeries
from millrace.infra import config
from millrace.infra.config import Settings
from millrace.infra.errors import ProofError
from millrace.schemas.records import LedgerEntry
from millrace.trainers.backends.layout import FROZEN


@dataclass(frozen=True, slots=True)
class TrainingPlace:
    """What would train in this place. device: what computes; threads: of its CPU kernels."""

    identity: Identity
    device: str
    threads: int


def training_place(settings: Settings) -> TrainingPlace:
    """Of this machine with these settings. Raises ConfigError where a model that `[learner]` names cannot be read."""
    return TrainingPlace(identify(settings), machine({}).device, settings.learner.threads)


def differences(place: TrainingPlace, entry: LedgerEntry) -> list[str]:
    """Each thing by which a step here differs from the one of `entry`, in words."""
    out: list[str] = []
    identity = place.identity
    if identity.config != entry["config_hash"]:
        with refusing_forgeries(entry):
            out += _settings(identity.text, entry["config"])
    if identity.code != entry["code_hash"]:
        out.append(
            f"the code is {identity.code[:12]}, was {entry['code_hash'][:12]}: check out the release that trained"
        )
    for name, then in sorted(entry["libraries"].items()):
        if (now := identity.libraries.get(name, "none")) != then:
            out.append(f"{name} is {now}, was {then}")
    if identity.cpu != entry["cpu"]:
        out.append(f"the CPU is of another kind ({identity.cpu}, was {entry['cpu']})")
    if entry["device"] and place.device != entry["device"]:
        out.append(f"the device is {place.device}, was {entry['device']}")
    if entry["threads"] and place.threads != entry["threads"] and not any("threads" in one for one in out):
        out.append(f"[learner] threads is {place.threads}, was {entry['threads']}")
    if entry["kernels"].get("repeatable") == "false":
        out.append(
            "[learner] repeatable was off, so that step would not have given the same bytes twice where it ran; what "
            "can be compared is its result within the tolerance of one step"
        )
    for role in FROZEN:
        now, then = identity.models.get(role, "none"), entry["models"].get(role, "none")
        if entry["config"] and now != then:
            out.append(f"the {role} has other content ({now[:12]}, was {then[:12]})")
    return out


def _settings(current: str, former: str) -> list[str]:
    """Which settings differ; what their hash alone says of an entry without them."""
    if not former:
        return ["the configuration of learner and policy is another (its hash; the entry does not say which setting)"]
    now, then = _flat(_without_models(current)), _flat(_without_models(former))
    missing = object()
    return [
        f"{_setting_name(name)} is {_value_text(now, name)}, was {_value_text(then, name)}"
        for name in sorted({*now, *then})
        if now.get(name, missing) != then.get(name, missing)
    ]


def _without_models(text: str) -> dict[str, Any]:
    """The settings but for those that name models, which are compared by their content."""
    values: dict[str, Any] = json.loads(text)
    for role in FROZEN:
        values["learner"].pop(role, None)
    return values


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {key: leaf for inner in value for key, leaf in _flat(value[inner], f"{name}.{inner}").items()}
    return {name.removeprefix("."): value}


def _setting_name(name: str) -> str:
    section, dot, key = name.partition(".")
    return f"[{section}] {key}" if dot else f"[policy] {'name' if name == 'policy' else name}"


def _value_text(values: Mapping[str, Any], name: str) -> str:
    return json.dumps(values[name]) if name in values else "not set"


def settings_of(settings: Settings, entry: LedgerEntry) -> Settings:
    """These settings with the learner and the release policy that the entry names. Raises ProofError where it names
    none, or none that a learner can have had."""
    if not entry["config"]:
        raise ProofError(
            f"version {entry['version']} does not say its configuration, only its hash: set [learner] as it was, and "
            "leave --recorded out"
        )
    # Models are on record by content alone: where they lie is for these settings to say.
    defaults = {name: getattr(settings.learner, name) for name in NOT_TRAINING}
    with refusing_forgeries(entry):
        configuration = json.loads(entry["config"])
        configuration["learner"] |= {role: getattr(settings.learner, role) for role in FROZEN}
        return settings.model_copy(
            update={
                "learner": config.Learner.model_validate({**defaults, **configuration["learner"]}),
                "policy": settings.policy.model_copy(update={"release": configuration["release"]}),
            }
        )


def refusal(deviations: Sequence[tuple[int, Sequence[str]]]) -> str:
    """Why versions cannot be proven here: each difference once, with the versions that it concerns."""
    by_text: dict[str, list[int]] = {}
    for version, differences_ in deviations:
        for text in differences_:
            by_text.setdefault(text, []).append(version)
    lines = [f"  {version_text(versions)}: {text}" for text, versions in by_text.items()]
    return (
        "this is not what trained them, so their bytes cannot be expected:\n"
        + "\n".join(lines)
        + "\nMake it equal (--recorded takes the configuration from the ledger), or add --anyway to train all the same "
        "and compare within the tolerance of one step"
    )
