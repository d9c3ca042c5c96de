"""The law about who trained: what one learner says of itself never changes, and its member id shows it.

Invariants: a member id belongs to one process, which has one configuration, one code, one set of libraries and one
sender; within a generation of the consumer group the ranks stay who they are. What a learner says that led one version
alone is compared with its member id, as far as that shows it."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, NamedTuple

from millrace.consumers.audit.facts import Facts
from millrace.consumers.audit.law import Law
from millrace.consumers.audit.rows import Mark, Row
from millrace.schemas.records import LedgerEntry, WeightVersion

SHOWN = re.compile(r"learner/([0-9a-f]{8})-([0-9a-f]{8})-([0-9a-f]{8})@")
"""how a member id begins: digests of configuration, code and libraries, shortened"""
DRIVER = "driver"
"""of a GPU: in the entry beside the libraries, and not in the digest that a member id shows"""
ROLES = ("reference", "teacher", "reward_model")
"""models that a step may read beside its own"""


class _Weights(NamedTuple):
    """What a weight event says that its learner decided once."""

    broadcast: str | None
    made_of: tuple[Any, ...]
    size: int | None


class _Led(NamedTuple):
    said: dict[str, Any]
    mark: Mark


class Leaders(Law):
    """Every version of one leader has its configuration, code, libraries, models, machine and address, and those of one
    generation the same ranks and layout. The configuration that an entry holds is the one of its hash, and names its
    models by their content. Directories with the same files for the same model are of one size."""

    name = "leaders"
    sentence = "what a learner says of itself stays the same, as do the ranks and layout of one generation"
    unit = "versions"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._weights: dict[int, _Weights] = {}
        self._said: dict[tuple[Any, ...], _Led] = {}
        self._newest: dict[str, tuple[int, Mark]] = {}

    def weights(self, row: Row[WeightVersion]) -> None:
        if row["version"] == 0 and row["broadcast"] is not None:
            self.fail("version 0 names a learner that sends it, but it comes from no learner", row, version=0)
        files = row["files"]
        made_of = (files.get("config.json"), tuple(sorted(files)))
        self._weights.setdefault(row["version"], _Weights(row["broadcast"], made_of, row["full_bytes"]))

    def ledger(self, row: Row[LedgerEntry]) -> None:
        if row["version"] == 0 and (claimed := [name for name, value in _of_training(row).items() if value]):
            self.fail(f"version 0, which nobody trained, says {', '.join(claimed)}", row, version=0)
        if not row["ranks"]:
            return
        self.finding.checked += 1
        self._configuration(row)
        weights = self._weights.get(row["version"])
        self._generation(row)
        self._ids(row)
        self._same((row["leader"],), _of_itself(row), row)
        if weights is None:
            return  # the law about versions names it
        said = {"broadcast": weights.broadcast, "full_bytes": weights.size}
        self._same((row["leader"], weights.made_of), said, row)

    def _configuration(self, row: Row[LedgerEntry]) -> None:
        """Entries of older releases hold none."""
        text, version = row["config"], row["version"]
        if not text:
            return
        if hashlib.sha256(text.encode()).hexdigest() != row["config_hash"]:
            self.fail(f"version {version} holds a configuration that is not the one of its hash", row, version=version)
        elif {role: _content(text, role) for role in ROLES if _content(text, role)} != row["models"]:
            self.fail(f"version {version} names other models than its configuration", row, version=version)

    def _same(self, who: tuple[Any, ...], said: dict[str, Any], row: Row) -> None:
        """Compare with what was first said by the same leader (in the same generation, of the same files)."""
        first = self._said.setdefault(who, _Led(said, row.mark))
        other = [name for name, value in said.items() if value != first.said[name]]
        if other:
            message = f"version {row['version']} says another {', '.join(other)} than its leader said before"
            self.fail(message, first.mark, row, version=row["version"], leader=row["leader"])

    def _generation(self, row: Row[LedgerEntry]) -> None:
        leader, generation = row["leader"], row["generation"]
        last = self._newest.get(leader)
        if last is not None and generation < last[0]:
            message = f"version {row['version']} was led in generation {generation} after {last[0]}"
            self.fail(message, last[1], row, version=row["version"], leader=leader)
        self._newest[leader] = max((generation, row.mark), last or (generation, row.mark), key=lambda pair: pair[0])
        ranks = [(share["rank"], share["member"], share["cell"]) for share in row["ranks"]]
        self._same((leader, generation), {"ranks": ranks, "layout": row["layout"]}, row)

    def _ids(self, row: Row[LedgerEntry]) -> None:
        shown_of = {name: version for name, version in row["libraries"].items() if name != DRIVER}
        libraries = hashlib.sha256(json.dumps(shown_of, sort_keys=True).encode()).hexdigest()
        own = tuple(digest[:8] for digest in (row["config_hash"], row["code_hash"], libraries))
        for member in (row["leader"], *(share["member"] for share in row["ranks"])):
            shown = SHOWN.match(member)
            if shown is not None and shown.groups() != own:
                message = f"version {row['version']} says another configuration, code or libraries than {member} shows"
                self.fail(message, row, version=row["version"])
                return


def _of_itself(row: Row[LedgerEntry]) -> dict[str, Any]:
    """What a process says of itself."""
    hashes = {"config_hash": row["config_hash"], "code_hash": row["code_hash"]}
    made_of = {"config": row["config"], "libraries": row["libraries"], "models": row["models"]}
    return {**hashes, **made_of, "cpu": row["cpu"], "device": row["device"], "threads": row["threads"]}


def _content(text: str, role: str) -> str:
    """sha256 hex of the model that plays a role, as a configuration says it; empty where nobody does."""
    said = json.loads(text).get("learner", {}).get(role) or ""
    return str(said).removeprefix("sha256:")


def _of_training(row: Row[LedgerEntry]) -> dict[str, Any]:
    """What an entry says of training, empty where nobody trained."""
    who = {"layout": row["layout"], "generation": row["generation"], "leader": row["leader"]}
    what = {"unchanged": row["unchanged"], "masked_tokens": row["masked_tokens"], "metrics": row["metrics"]}
    return _of_itself(row) | who | what
