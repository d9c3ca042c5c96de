"""Strings of one document that spell one value together: each ends where a word goes on that the next one begins with.

Invariants: only strings of one message of a document are joined, in their order: those under keys of one name but for
digits, those of lists, and in an event of at most NEIGHBOURS leaves those behind one another; of each no more than
REACH bytes at either end."""

from __future__ import annotations

from millrace.streams.refine.leaves import Buffer, LeafKind

REACH = 256
"""bytes of a string at the end where another one goes on"""
NEIGHBOURS = 512
"""leaves of an event whose strings are joined whatever their keys are called: traffic has thousands of short ones"""
MESSAGE_KEYS = frozenset({b"role", b"call_id", b"tool_call_id"})
"""keys of a message of its own: what a request leaves out must not change how the rest is read"""
SHORTEST = 16
"""bytes of what several strings spell"""
_WORD = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_+/=~-"
_LETTERS = frozenset(_WORD)
_DIGITS = b"0123456789"

Chain = list[tuple[int, int]]


def chains(buffer: Buffer) -> list[Chain]:
    """The spans of the buffer that belong together, two or more at a time."""
    text = buffer.text
    out: list[Chain] = []
    tracks: dict[bytes | None, Chain] = {}
    source, key_end, name = -1, -1, b""
    key_kind, string_kind, letters = LeafKind.KEY, LeafKind.STRING, _LETTERS
    has_neighbours = len(buffer.leaves) <= NEIGHBOURS
    for leaf in buffer.leaves:
        kind, start, end, origin, _, _ = leaf
        if kind is key_kind:
            name, key_end = text[start:end].rstrip(_DIGITS), end
            if name in MESSAGE_KEYS:
                source = -1
        elif kind is string_kind and start < end:
            if origin != source:
                out += tracks.values()
                tracks, source = {}, origin
            goes_on, comes = text[end - 1] in letters, text[start] in letters
            key = name if key_end + 3 == start else b""
            for track in (None, key) if has_neighbours else (key,):
                chain = tracks.get(track)
                if chain is not None and comes:
                    head = text[start : min(end, start + REACH)]
                    beyond = start + len(head) - len(head.lstrip(_WORD))
                    chain.append((start, beyond))
                    if beyond == end:
                        continue
                if chain is not None:
                    if len(chain) > 1:
                        out.append(chain)
                    del tracks[track]
                if goes_on:
                    tail = text[max(start, end - REACH) : end]
                    tracks[track] = [(end - len(tail) + len(tail.rstrip(_WORD)), end)]
    out += tracks.values()
    return [chain for chain in out if _is_value(text, chain)]


def _is_value(text: bytes, chain: Chain) -> bool:
    if len(chain) < 2 or sum(hi - lo for lo, hi in chain) < SHORTEST:
        return False
    value = b"".join(text[lo:hi] for lo, hi in chain)
    return 0 < len(value.translate(None, _DIGITS)) < len(value)
