"""From a rank's share of the manifest to samples: what cannot be read or trained on is left out, by whole groups.

Invariants: a group is read whole or is lost; nothing that could break a step reaches it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from millrace.consumers.learner.step.next_work import PlacedGroup
from millrace.consumers.learner.version.records import AGES
from millrace.infra import telemetry
from millrace.infra.log.base import Place
from millrace.infra.log.history.places import CLAIM, CORRUPT, GONE, LostRecord, PlaceReader
from millrace.trainers.batches.sample import Sample, check, samples_of
from millrace.trainers.errors import BadSample

IMPOSSIBLE = "not trainable: its arrays or numbers are impossible"
NO_PLACES = "it names no trajectories"
REASONS = ("", GONE, CLAIM, CORRUPT, IMPOSSIBLE, NO_PLACES)
"""by code, so that ranks can tell each other with one number a group"""


@dataclass(slots=True)
class RankBatch:
    """What a rank trains on. losses: code by seq; details: the same in words, for this process's own log."""

    samples: list[Sample] = field(default_factory=list)
    losses: dict[int, int] = field(default_factory=dict)
    details: list[str] = field(default_factory=list)


def read(reader: PlaceReader, parts: Sequence[PlacedGroup], *, vocabulary: int, longest: int) -> RankBatch:
    """Fetch and check the groups of one rank. Raises UnreachableError when the log does not answer."""
    trajectories = iter(reader.trajectories([Place(*place) for part in parts for place in part.places]))
    share = RankBatch()
    for part in parts:
        group = [next(trajectories) for _ in part.places]
        samples: list[Sample] = []
        problem = None if group else LostRecord(NO_PLACES, f"group {part.group}")
        for one in group:
            if isinstance(one, LostRecord):
                problem = one
                break
            try:
                with telemetry.span("millrace.learn", trajectory=one["id"], group=part.group, seq=part.seq):
                    samples += samples_of(one, part.seq)
                    check(samples, vocabulary=vocabulary, longest=longest)
            except BadSample as error:
                problem = LostRecord(IMPOSSIBLE, str(error))
                break
            except (ArithmeticError, LookupError, TypeError, ValueError) as error:
                problem = LostRecord(IMPOSSIBLE, f"{type(error).__name__} at {one['id']}")
                break
        if problem is None:
            share.samples += samples
        else:
            share.losses[part.seq] = REASONS.index(problem.reason)
            share.details.append(f"group {part.group} (seq {part.seq}) is lost: {problem.detail}")
    return share


def ages(samples: Sequence[Sample], version: int) -> list[float]:
    """Trainable tokens by how many versions they are behind `version`: AGES + 1 numbers, the last for all beyond."""
    counts = np.zeros(AGES + 1)
    for sample in samples:
        behind = version - sample.versions[(sample.mask != 0) & (sample.versions >= 0)]
        counts += np.bincount(np.clip(behind, 0, AGES), minlength=AGES + 1)
    return [float(count) for count in counts]
