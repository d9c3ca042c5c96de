"""How the bytes of an answer are packed: the encodings of HTTP. Pure.

Every packer takes pieces and gives what may be sent after each, so that an answer never lies whole in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cramjam

_PACKERS: dict[str, Callable[[], Any]] = {
    "zstd": lambda: cramjam.zstd.Compressor(1),
    "lz4": cramjam.lz4.Compressor,
    "gzip": lambda: cramjam.gzip.Compressor(1),
    "deflate": lambda: cramjam.zlib.Compressor(1),
    "br": lambda: cramjam.brotli.Compressor(1),
}


def choose(header: str) -> str:
    """The encoding for an Accept-Encoding header: of those that we have, the first that is not refused; else empty."""
    for part in header.split(","):
        name, _, weight = part.strip().partition(";")
        if name.strip().lower() in _PACKERS and weight.replace(" ", "") not in ("q=0", "q=0.0"):
            return name.strip().lower()
    return ""


def pack(pieces: Iterator[bytes], encoding: str) -> Iterator[bytes]:
    """The pieces in an encoding, each as soon as it may be sent; as they are for an empty one."""
    if not encoding:
        yield from pieces
        return
    packer = _PACKERS[encoding]()
    for piece in pieces:
        packer.compress(piece)
        if out := bytes(packer.flush()):
            yield out
    if out := bytes(packer.finish()):
        yield out
