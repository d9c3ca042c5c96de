"""Which process of a gateway a request belongs to: a pure function of what the request says of its conversation.

A request is sent along `ways`, in order. Each but the last asks only who holds the conversation already: a process that
does not begins nothing for it, and the next is asked. The last one answers whatever it holds.

- An id that one process minted (a session's key, `previous_response_id`) leads to that process and to no other.
- A name leads to the process that the name's digest chooses. A session's id that is used as a name is asked for first
  where it was minted.
- Without a name, ids that the conversation was told (of tool calls) are asked for where they were minted, if that is
  one place; then the messages before the first reply choose, since nothing that goes on from them changes them.
- What says nothing is answered where it arrives.

Where the number of processes was another one before, the process that this one would have chosen is asked first.

Invariants: the last way depends on the evidence and the number of processes alone, never on where the request arrived,
but for requests without evidence and for ids of nobody who is still there; no process is asked twice in a row; of two
kinds of evidence that lead apart, the former of this list decides where it leads to a session, as it does within one
process (`whose`)."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import NamedTuple

from millrace.producers.gateway.marks import UUID7, index_of


class Evidence(NamedTuple):
    """What a request says of the conversation that it belongs to. `exact`: an id that only its process can answer for;
    `name`: the name, or the id, of a session; `attempt`: of a start; `call_ids`: ids that the conversation was told;
    `head`: a digest of the messages before its first reply."""

    exact: str | None = None
    name: str | None = None
    attempt: str | None = None
    call_ids: tuple[str, ...] = ()
    head: bytes | None = None


class ProcessLayout(NamedTuple):
    """The processes of a gateway as one of them, `here`, knows them. `former`: the numbers of them that there were
    before, the newest first, as long as their sessions may go on."""

    here: int
    processes: int
    former: tuple[int, ...] = ()

    @property
    def holders(self) -> range:
        """All that hold sessions, or may."""
        return range(max(self.processes, *self.former, self.here + 1))


class ProcessWay(NamedTuple):
    """A process to ask. `must_exist`: only for what it holds already."""

    process: int
    must_exist: bool


def ways(evidence: Evidence, layout: ProcessLayout) -> list[ProcessWay]:
    """Whom to ask, in this order; at least one, the last of them without `held`."""
    out: list[ProcessWay] = []
    for way in _ways(evidence, layout):
        if out and out[-1].process == way.process:
            out.pop()
        out.append(way)
    return out


def _ways(evidence: Evidence, layout: ProcessLayout) -> Iterator[ProcessWay]:
    here, holders = layout.here, layout.holders
    if evidence.exact is not None:
        index = index_of(evidence.exact)
        if index is not None and index in holders:
            is_gone = index >= layout.processes
            yield ProcessWay(index, must_exist=is_gone)
            if not is_gone:
                return
        elif index is None:  # of an older release, or minted by somebody else
            yield from (ProcessWay(process, must_exist=True) for process in holders if process != here)
        yield ProcessWay(here, must_exist=False)
        return
    if evidence.name is not None:
        index = index_of(evidence.name)
        if index is None and layout.former and UUID7.fullmatch(evidence.name):
            index = 0  # a session of before there were several processes
        if index is not None and index in holders:
            yield ProcessWay(index, must_exist=True)
        yield from _by(f"name {evidence.name}", layout)
    elif evidence.attempt is not None:
        yield from _by(f"attempt {evidence.attempt}", layout)
    elif evidence.head is not None:
        places = {index for id in evidence.call_ids if (index := index_of(id)) is not None and index in holders}
        if len(places) == 1:
            yield ProcessWay(places.pop(), must_exist=True)
        yield from _by(f"head {evidence.head.hex()}", layout)
    else:
        yield ProcessWay(here, must_exist=False)


def _by(key: str, layout: ProcessLayout) -> Iterator[ProcessWay]:
    """Those that a digest chooses, and chose before, where that is another."""
    now = choose_process(key, layout.processes)
    former = {index: None for processes in layout.former if (index := choose_process(key, processes)) != now}
    yield from (ProcessWay(index, must_exist=True) for index in former)
    yield ProcessWay(now, must_exist=False)


def choose_process(key: str, processes: int) -> int:
    """The process that a key belongs to: of one process more, few keys move, and all of them to the new one."""
    text = key.encode(errors="surrogatepass")
    return max(range(processes), key=lambda index: blake2b(text, digest_size=8, key=index.to_bytes(1, "big")).digest())
