"""Whether a topic is still the one that its rows came from, or was deleted and made anew under the same name.

Invariants: what is called another topic is one: it ends before rows do, or holds another record where the last proven
row came from. Where the log has forgotten that record, or an older release wrote no proof of it, nobody can tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import xxhash

from millrace.consumers.warehouse.store.base import Store
from millrace.consumers.warehouse.store.columns import text
from millrace.consumers.warehouse.store.fences import Where
from millrace.consumers.warehouse.store.tables import LOG
from millrace.infra.log.base import Bus, Place, Record
from millrace.infra.log.topics import logical_name

COMPACT_TOPICS = frozenset({"principals", "workers"})
"""topics whose older records the log itself gives up"""


class Tip(NamedTuple):
    """The last record of a partition of which `blocks` says that it was taken in."""

    offset: int
    digest: str


def tip_of(record: Record) -> str:
    """The digest of a record as the log holds it: a topic that was restored from an archive, or made again by `replay
    rebuild`, has the same ones. Pure."""
    digest = xxhash.xxh3_128(len(record.key).to_bytes(8, "little"))
    digest.update(record.key)
    digest.update(b"" if record.value is None else b"\1" + record.value)
    return digest.hexdigest()


def tips(store: Store, namespace: str) -> Mapping[Where, Tip]:
    """The newest tip of each partition of a namespace; none where a rebuild died, or a former release wrote, before
    there were any."""
    column = f"SELECT 1 FROM system.columns WHERE database = {text(LOG)} AND table = 'blocks' AND name = 'tip'"
    if not store.rows(column):
        return {}
    rows = store.rows(
        f"SELECT topic, part, max(last), argMax(tip, last) FROM {LOG}.blocks"
        f" WHERE startsWith(topic, {text(namespace + '.')}) AND tip != '' GROUP BY topic, part"
    )
    return {(topic, part): Tip(last, digest) for topic, part, last, digest in rows}


def recreation_reason(bus: Bus, where: Where, position: int, tip: Tip | None) -> str:
    """Why a partition, of which rows are there below `position`, is another one than they came from; empty where it is
    the same, or nobody can tell."""
    topic, part = where
    start, end = bus.starts(topic)[part], bus.ends(topic)[part]
    if position > end:
        return f"ends at offset {end}, and the warehouse has it up to {position}"
    if tip is None or not start <= tip.offset < end:
        return ""
    (record,) = bus.fetch([Place(topic, part, tip.offset)])
    if record is None:
        is_forgotten = logical_name(topic) in COMPACT_TOPICS or tip.offset < bus.starts(topic)[part]  # meanwhile
        return "" if is_forgotten else f"has no record at offset {tip.offset}, where a row came from"
    return "" if tip_of(record) == tip.digest else f"holds another record at offset {tip.offset} than a row came from"
