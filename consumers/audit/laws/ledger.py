"""Laws about ledger entries: their figures follow from the batch that they name (`Figures`), and what one learner says
of itself never changes, as its member id shows it (`Leaders`).

Figures that only the training process knew (loss, timings, libraries, code) cannot be computed again; the hash chain
covers them. Those that depend on what an algorithm left out of a batch are bounded by the batch instead.

Invariants: a member id belongs to one process, which has one configuration, one code, one set of libraries and one
sender; within a generation of the consumer group the ranks stay who they are. What a learner says that led one version
alone is compared with its member id, as far as that shows it."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict

import numpy as np

from millrace.consumers.audit.facts import Facts
from millrace.consumers.audit.law import Law, SealedSample
from millrace.infra.log.history.rows import Mark, Row
from millrace.schemas.records import LedgerEntry, RankShare, TrainedGroup, WeightVersion

AGES = 8
"""tokens are counted by how many versions they are behind: 0, 1, ... and from here on together"""

COUNTS = ("steps", "steps_skipped", "value_steps_skipped", "tokens_trainable", "samples_without_reward")
TIMES = "timings_"
"""how the metrics begin that are seconds"""

EXCUSES = ("not trainable", "its claimed bytes")
"""how the reasons begin for which a group may be lost although its records lie there"""


class _Entry(TypedDict):
    """What is kept of a ledger entry."""

    groups: list[TrainedGroup]
    ranks: list[RankShare]
    metrics: dict[str, float]
    eta: int
    masked_tokens: int


def _entry_facts(entry: LedgerEntry) -> _Entry:
    return {
        "groups": entry["groups"],
        "ranks": entry["ranks"],
        "metrics": entry["metrics"],
        "eta": entry["eta"],
        "masked_tokens": entry["masked_tokens"],
    }


@dataclass(slots=True)
class _Batch:
    """What the samples of a version came to."""

    mark: Mark
    entry: _Entry
    rewards: dict[str, float | None] = field(default_factory=dict)
    seqs: set[int] = field(default_factory=set)
    length: int = 0
    ages: np.ndarray[Any, np.dtype[np.int64]] = field(default_factory=lambda: np.zeros(AGES + 1, np.int64))
    oldest: int = 0
    sample_count: int = 0
    there: dict[int, int] = field(default_factory=dict)
    """by seq, how many of its samples can be read"""


class Figures(Law):
    """Samples, tokens, rewards, ages, shares of ranks and settings of each version, from the samples themselves."""

    name = "figures"
    sentence = "what each ledger entry says of its batch follows from the batch"
    unit = "figures"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._batches: dict[int, _Batch] = {}

    def ledger(self, row: Row[LedgerEntry]) -> None:
        entry = row.record
        self._batches.setdefault(row["version"], _Batch(row.mark, _entry_facts(entry)))
        ranks = entry["ranks"]
        if [share["rank"] for share in ranks] != list(range(len(ranks))):
            self.fail(f"version {row['version']} does not count its ranks from 0", row, version=row["version"])
        if ranks and entry["leader"] != ranks[0]["member"]:
            self.fail(f"version {row['version']} has a leader who is not its rank 0", row, version=row["version"])
        if len({share["member"] for share in ranks}) != len(ranks):
            self.fail(f"a member has two ranks in version {row['version']}", row, version=row["version"])
        has_cells = any(share["cell"] >= 0 for share in ranks)
        if has_cells and any(share["cell"] < 0 and (share["samples"] or share["tokens"]) for share in ranks):
            self.fail(f"a rank of version {row['version']} that serves a role trained", row, version=row["version"])
        group_cells = {group["cell"] for group in entry["groups"]}
        rank_cells = {share["cell"] for share in ranks if share["cell"] >= 0}
        # Who holds its configuration says who computed what; older releases said neither.
        if not group_cells <= (rank_cells if entry["config"] else {*rank_cells, -1}):
            self.fail(f"version {row['version']} names a cell that no rank is of", row, version=row["version"])

    def trajectory(self, sample: SealedSample) -> None:
        for group in self.facts.trained_in(sample.row.place):
            batch = self._batches.get(group.version)
            if batch is None:
                continue
            batch.sample_count += 1
            batch.there[group.seq] = batch.there.get(group.seq, 0) + 1
            if group.loss is not None or not sample.traces:
                continue
            reward = sample.row["reward"]
            batch.rewards[sample.row["id"]] = reward if reward is not None and math.isfinite(reward) else None
            batch.seqs.add(group.seq)
            batch.length += sum(len(trace.tokens) for trace in sample.traces)
            ages = group.version - 1 - sample.trained_versions
            if len(ages):
                batch.oldest = max(batch.oldest, int(ages.max()))
                batch.ages += np.bincount(np.clip(ages, 0, AGES), minlength=AGES + 1)

    def finish(self) -> None:
        unread = 0
        for version, batch in sorted(self._batches.items()):
            if version in self.facts.selected:
                continue  # its samples lie among those of another policy
            self._check_losses(version, batch)
            count = sum(len(group["trajectories"]) for group in batch.entry["groups"])
            if batch.sample_count != count:
                unread += 1
                continue
            for name, figure, batch_figure in self._comparisons(version, batch):
                self.finding.checked += 1
                if not math.isclose(figure, batch_figure, rel_tol=1e-5, abs_tol=1e-6):
                    message = f"version {version} says {name} {figure:g}; its batch comes to {batch_figure:g}"
                    self.fail(message, batch.mark, version=version)
            for problem in self._excesses(batch):
                self.fail(f"version {version} {problem}", batch.mark, version=version)
        if unread:
            self.note(f"{unread} versions cannot be computed again: some of their samples cannot be read any more")

    def _check_losses(self, version: int, batch: _Batch) -> None:
        """A group that every sample can still be read of was not lost, unless for what is in them or behind a claim."""
        for group in batch.entry["groups"]:
            reason, count = group["lost"], len(group["trajectories"])
            if reason is None or reason.startswith(EXCUSES) or batch.there.get(group["seq"], 0) < max(1, count):
                continue
            message = f"version {version} calls a group lost ({reason}) that is there"
            self.fail(message, batch.mark, version=version, seq=group["seq"], group=group["group"])

    def _comparisons(self, version: int, batch: _Batch) -> Iterator[tuple[str, float, float]]:
        """(figure, as the entry says, as its batch comes to), of those that the entry holds."""
        metrics, ranks = batch.entry["metrics"], batch.entry["ranks"]
        rewards = [reward for reward in batch.rewards.values() if reward is not None]
        true: dict[str, float] = {
            "reward_mean": math.fsum(rewards) / len(rewards) if rewards else 0.0,
            "samples": len(batch.rewards),
            "samples_without_reward": len(batch.rewards) - len(rewards),
        }
        if any(name.startswith("staleness_tokens_") for name in metrics):
            true |= {f"staleness_tokens_{age}": int(batch.ages[age]) for age in range(AGES)}
            true[f"staleness_tokens_{AGES}_or_more"] = int(batch.ages[AGES])
        true |= self._spans(version, batch)
        for name, value in true.items():
            # A count of nothing is left out of an entry; anything else that is missing is not compared.
            if name in metrics or (name.startswith("staleness_tokens_") and value):
                yield name, metrics.get(name, 0.0), value
        if ranks:
            yield "samples of all ranks", sum(share["samples"] for share in ranks), len(batch.rewards)
            yield "groups of all ranks", sum(share["groups"] for share in ranks), len(batch.seqs)
            yield from _by_cell(batch)
            if "tokens_computed" in metrics:
                total = sum(share["tokens"] for share in ranks)
                yield "tokens_computed", metrics["tokens_computed"], total
        bounds = [self.facts.eta.at(group["ticket"] or 0) for group in batch.entry["groups"]]
        etas = [float(eta) for eta in bounds if eta is not None]
        if etas and len(etas) == len(bounds):
            yield "eta", batch.entry["eta"], max(etas)

    def _spans(self, version: int, batch: _Batch) -> dict[str, float]:
        """How far behind the oldest and newest trainable tokens of the groups are, as they were resolved."""
        seqs = [group["seq"] for group in batch.entry["groups"]]
        if any(seq not in self.facts.spans for seq in seqs):
            return {}
        out: dict[str, float] = {}
        for name, at in (("head", 0), ("tail", 1)):
            ages = [version - 1 - self.facts.spans[seq][at] for seq in seqs if self.facts.spans[seq][at] >= 0]
            if ages:
                out |= {f"staleness_{name}_mean": sum(ages) / len(ages), f"staleness_{name}_max": max(ages)}
        return out

    def _excesses(self, batch: _Batch) -> Iterator[str]:
        """What an algorithm may have left out can only lower these."""
        metrics, trainable = batch.entry["metrics"], int(batch.ages.sum())
        for name, value in metrics.items():
            if value < 0 and (name in COUNTS or name.startswith(TIMES)):
                yield f"says {name} {value:g}, which is below 0"
            elif name in COUNTS and not float(value).is_integer():
                yield f"says {name} {value:g}, which is no count"
        if metrics.get("tokens_trainable", 0) > trainable:
            yield f"trained {metrics['tokens_trainable']:g} tokens where its batch holds {trainable}"
        if metrics.get("tokens_computed", 0) > batch.length:
            yield f"computed {metrics['tokens_computed']:g} tokens where its batch holds {batch.length}"
        if batch.entry["masked_tokens"] > trainable:
            yield f"masked {batch.entry['masked_tokens']} tokens where its batch holds {trainable}"
        if not 0 <= metrics.get("staleness_mean", 0) <= metrics.get("staleness_max", math.inf):
            yield "has a mean staleness beyond its largest"
        if metrics.get("staleness_max", 0) > batch.oldest:
            yield f"says staleness {metrics['staleness_max']:g} where its oldest token is {batch.oldest} behind"
        if metrics.get("tokens_trainable") == trainable and "staleness_mean" in metrics and not batch.ages[AGES]:
            mean = float((batch.ages * np.arange(AGES + 1)).sum() / trainable) if trainable else 0.0
            if not math.isclose(metrics["staleness_mean"], mean, rel_tol=1e-4, abs_tol=1e-6):
                yield f"says a mean staleness of {metrics['staleness_mean']:g}; its batch comes to {mean:g}"
            if "staleness_max" in metrics and metrics["staleness_max"] != batch.oldest:
                yield f"says staleness {metrics['staleness_max']:g} where its oldest token is {batch.oldest} behind"


def _by_cell(batch: _Batch) -> Iterator[tuple[str, float, float]]:
    """(figure, groups as the ranks of a cell count them, groups that were given to it), where entries name cells."""
    cells = {group["seq"]: group["cell"] for group in batch.entry["groups"]}
    if -1 in cells.values():
        return
    for cell in sorted({share["cell"] for share in batch.entry["ranks"] if share["cell"] >= 0}):
        groups = sum(share["groups"] for share in batch.entry["ranks"] if share["cell"] == cell)
        yield f"groups of cell {cell}", groups, sum(cells.get(seq) == cell for seq in batch.seqs)


MEMBER_ID = re.compile(r"learner/([0-9a-f]{8})-([0-9a-f]{8})-([0-9a-f]{8})@")
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


class _LeaderFacts(NamedTuple):
    facts: dict[str, Any]
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
        self._said: dict[tuple[Any, ...], _LeaderFacts] = {}
        self._newest: dict[str, tuple[int, Mark]] = {}

    def weights(self, row: Row[WeightVersion]) -> None:
        if row["version"] == 0 and row["broadcast"] is not None:
            self.fail("version 0 names a learner that sends it, but it comes from no learner", row, version=0)
        files = row["files"]
        made_of = (files.get("config.json"), tuple(sorted(files)))
        self._weights.setdefault(row["version"], _Weights(row["broadcast"], made_of, row["full_bytes"]))

    def ledger(self, row: Row[LedgerEntry]) -> None:
        if row["version"] == 0 and (claims := [name for name, value in _of_training(row).items() if value]):
            self.fail(f"version 0, which nobody trained, says {', '.join(claims)}", row, version=0)
        if not row["ranks"]:
            return
        self.finding.checked += 1
        self._configuration(row)
        weights = self._weights.get(row["version"])
        self._generation(row)
        self._ids(row)
        self._compare((row["leader"],), _of_itself(row), row)
        if weights is None:
            return  # the law about versions names it
        facts = {"broadcast": weights.broadcast, "full_bytes": weights.size}
        self._compare((row["leader"], weights.made_of), facts, row)

    def _configuration(self, row: Row[LedgerEntry]) -> None:
        """Entries of older releases hold none."""
        text, version = row["config"], row["version"]
        if not text:
            return
        if hashlib.sha256(text.encode()).hexdigest() != row["config_hash"]:
            self.fail(f"version {version} holds a configuration that is not the one of its hash", row, version=version)
        elif {role: _content(text, role) for role in ROLES if _content(text, role)} != row["models"]:
            self.fail(f"version {version} names other models than its configuration", row, version=version)

    def _compare(self, key: tuple[Any, ...], facts: dict[str, Any], row: Row) -> None:
        """Compare with what was first said by the same leader (in the same generation, of the same files)."""
        first = self._said.setdefault(key, _LeaderFacts(facts, row.mark))
        names = [name for name, value in facts.items() if value != first.facts[name]]
        if names:
            message = f"version {row['version']} says another {', '.join(names)} than its leader said before"
            self.fail(message, first.mark, row, version=row["version"], leader=row["leader"])

    def _generation(self, row: Row[LedgerEntry]) -> None:
        leader, generation = row["leader"], row["generation"]
        last = self._newest.get(leader)
        if last is not None and generation < last[0]:
            message = f"version {row['version']} was led in generation {generation} after {last[0]}"
            self.fail(message, last[1], row, version=row["version"], leader=leader)
        self._newest[leader] = max((generation, row.mark), last or (generation, row.mark), key=lambda pair: pair[0])
        ranks = [(share["rank"], share["member"], share["cell"]) for share in row["ranks"]]
        self._compare((leader, generation), {"ranks": ranks, "layout": row["layout"]}, row)

    def _ids(self, row: Row[LedgerEntry]) -> None:
        hashed_versions = {name: version for name, version in row["libraries"].items() if name != DRIVER}
        libraries = hashlib.sha256(json.dumps(hashed_versions, sort_keys=True).encode()).hexdigest()
        digests = tuple(digest[:8] for digest in (row["config_hash"], row["code_hash"], libraries))
        for member in (row["leader"], *(share["member"] for share in row["ranks"])):
            match = MEMBER_ID.match(member)
            if match is not None and match.groups() != digests:
                message = f"version {row['version']} says another configuration, code or libraries than {member} shows"
                self.fail(message, row, version=row["version"])
                return


def _of_itself(row: Row[LedgerEntry]) -> dict[str, Any]:
    """What a process says of itself."""
    hashes = {"config_hash": row["config_hash"], "code_hash": row["code_hash"]}
    made_of = {"config": row["config"], "libraries": row["libraries"], "models": row["models"]}
    # A step may shorten its rows, and a version without a step has not attended.
    kernels = {name: kind for name, kind in row["kernels"].items() if name not in ("tokens_per_pack", "attention")}
    return {
        **hashes,
        **made_of,
        "kernels": kernels,
        "cpu": row["cpu"],
        "device": row["device"],
        "threads": row["threads"],
    }


def _content(text: str, role: str) -> str:
    """sha256 hex of the model that plays a role, as a configuration says it; empty where nobody does."""
    model = json.loads(text).get("learner", {}).get(role) or ""
    return str(model).removeprefix("sha256:")


def _of_training(row: Row[LedgerEntry]) -> dict[str, Any]:
    """What an entry says of training, empty where nobody trained."""
    leadership = {"layout": row["layout"], "generation": row["generation"], "leader": row["leader"]}
    figures = {"unchanged": row["unchanged"], "masked_tokens": row["masked_tokens"], "metrics": row["metrics"]}
    return _of_itself(row) | leadership | figures
