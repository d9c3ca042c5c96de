"""A stream of server-sent events in pieces that end where events end, so that an event of ours can follow any of them.

Invariants: no byte is lost, added or moved; what is searched of each part is the part and the few bytes before it,
however long the event is that it belongs to; an event longer than `EVENT_BYTES` is not held back."""

from __future__ import annotations

from millrace.schemas import bounds

ENDS = (b"\n\n", b"\r\n\r\n")
OVERLAP = max(map(len, ENDS)) - 1
"""bytes of an end that may have come before the part that completes it"""


class Cut:
    """`rest`: the bytes of the event whose end did not come."""

    def __init__(self) -> None:
        self.rest = bytearray()

    def feed(self, part: bytes) -> bytes:
        """The whole events that are there with these bytes, b"" where there is none."""
        start = max(0, len(self.rest) - OVERLAP)
        self.rest += part
        at = start + behind(bytes(self.rest[start:]))
        if at == start:
            at = 0
        if len(self.rest) - at > bounds.EVENT_BYTES:
            at = len(self.rest)
        whole = bytes(self.rest[:at])
        del self.rest[:at]
        return whole


def behind(data: bytes) -> int:
    """Where the last event ends that does; 0 where none does."""
    return max((at + len(end) for end in ENDS if (at := data.rfind(end)) >= 0), default=0)
