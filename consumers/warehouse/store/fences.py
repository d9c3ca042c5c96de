"""Who may bring in a partition, on a server that several processes write to: one holder, as the table `fences` says.

Taking over is three steps, in this order: (1) write a newer row to `fences`; (2) wait until no insert of the partition,
and none into `blocks`, is among the running queries; (3) ask how far the tables are. An insert asks, within its own
statement, whether its holder still is the newest.

Invariant: a server lists a query as running before it reads a table for it, and until its part is there or never will
be. So an insert of a former holder either reads `fences` after (1), and is refused; or it was listed before (1), and
then (2) waits for it and (3) counts its rows. It is never both let through and overlooked, however long its process was
paused or its bytes were under way. That holds on one server, not for several replicas behind one URL.

Rows of former holders are deleted once there are many. Who is the newest stays the same whenever that happens, however
late: a holder deletes only what is older than a row that it has written itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from millrace.consumers.warehouse.store.base import REFUSAL, Store
from millrace.consumers.warehouse.store.columns import text
from millrace.consumers.warehouse.store.tables import LOG

MANY = 64
"""rows of a partition from which on those of former holders are deleted"""
AT_ONCE = 256
"""partitions whose former rows one statement deletes: an engine takes none that is too long"""
PROOFS = "millrace-proofs-"
"""what the ids of all inserts into `blocks` begin with: one of them may be about several partitions"""
Where = tuple[str, int]
"""a partition: full topic name and number"""


@dataclass(frozen=True, slots=True)
class Fence:
    """The condition under which one holder's rows of a partition come in."""

    topic: str
    part: int
    holder: str

    @property
    def condition(self) -> str:
        """SQL that fails, with `REFUSAL`, once another holder is the newest."""
        newest = (
            f"(SELECT argMax(holder, (epoch, holder)) FROM {LOG}.fences"
            f" WHERE topic = {text(self.topic)} AND part = {self.part})"
        )
        return f"throwIf({newest} != {text(self.holder)}, {text(REFUSAL)}) = 0"


def insert_prefix(where: Where) -> str:
    """What the ids of all inserts of a partition begin with."""
    topic, part = where
    return f"millrace-{topic}-{part}-"


def take_over(store: Store, holder: str, partitions: Collection[Where]) -> None:
    """Have no insert of a former holder of these partitions come in from now on. `holder` names one attempt, never two.
    Raises WarehouseError where an insert of a former one does not end."""
    if not partitions:
        return
    standings = {
        (topic, part): (int(epoch), int(count))
        for topic, part, epoch, count in store.rows(
            f"SELECT topic, part, max(epoch), count() FROM {LOG}.fences GROUP BY topic, part"
        )
    }
    epochs = {where: standings.get(where, (0, 0))[0] + 1 for where in sorted(partitions)}
    rows = ", ".join(
        f"({text(topic)}, {part}, {epoch}, {text(holder)}, now64(3))" for (topic, part), epoch in epochs.items()
    )
    store.run(f"INSERT INTO {LOG}.fences (topic, part, epoch, holder, taken) SETTINGS async_insert = 0 VALUES {rows}")
    store.settle([PROOFS, *map(insert_prefix, partitions)])
    former = [(where, epoch) for where, epoch in epochs.items() if standings.get(where, (0, 0))[1] >= MANY]
    for first in range(0, len(former), AT_ONCE):
        some = dict(former[first : first + AT_ONCE])
        store.run(f"ALTER TABLE {LOG}.fences DELETE WHERE {older(some)} SETTINGS mutations_sync = 0")


def older(epochs: Mapping[Where, int]) -> str:
    """SQL for the rows of partitions that are older than these. Pure."""
    return " OR ".join(
        f"(topic = {text(topic)} AND part = {part} AND epoch < {epoch})" for (topic, part), epoch in epochs.items()
    )
