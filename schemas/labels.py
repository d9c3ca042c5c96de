"""How a weight version is called inside an engine: `<policy>@<version>`, stamped on every token that it samples.

Adapters are called so too, by name; the weights under them are labelled as a base, which is no version.

Invariant: a label that does not parse (an engine's own default, a load in progress, a base without an adapter) names no
version, so tokens that carry it are never trained."""

from __future__ import annotations

import re
from collections.abc import Iterable

_LABEL = re.compile(r"(?P<policy>.+)@(?P<version>0|[1-9][0-9]*)")

LOADING = "loading"
"""label between the start of a load and its success"""
MIXED = "mixed"
"""label of tokens that an adapter sampled while its base changed"""
_BASE = "base:"


def make_label(policy: str, version: int) -> str:
    """The label of version `version` (0 or above) of `policy`."""
    if version < 0:
        raise ValueError(f"a weight version is 0 or above, not {version}")
    return f"{policy}@{version}"


def parse_label(label: str) -> tuple[str, int] | None:
    """(policy, version), or None for anything that `make_label` did not write."""
    match = _LABEL.fullmatch(label)
    return (match["policy"], int(match["version"])) if match else None


def newest_label(labels: Iterable[str]) -> str | None:
    """The one of the highest version, None where none names a version."""
    versions = {parsed[1]: label for label in labels if (parsed := parse_label(label)) is not None}
    return versions[max(versions)] if versions else None


def base_label(digest: str) -> str:
    """The label of weights that carry adapters and are no version themselves. digest: hex."""
    return f"{_BASE}{digest[:12]}"


def is_base(label: str) -> bool:
    """Whether `base_label` wrote it."""
    return label.startswith(_BASE)
