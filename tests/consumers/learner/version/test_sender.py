"""The learner's end of broadcasts before strangers: what no reloader would ask is refused at once."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

import pytest

from millrace.consumers.learner.version.sender import LONGEST, PATIENCE_S, WeightSender


@pytest.mark.parametrize(
    "length",
    [f"{LONGEST + 1}", "99999999999999", "-1", "0", "x", None],
    ids=["long", "huge", "negative", "none", "odd", "absent"],
)
def test_a_request_of_any_length_is_answered_before_it_is_read(length: str | None) -> None:
    sender = WeightSender("127.0.0.1", 1.0)
    try:
        at = urlsplit(sender.url)
        with socket.create_connection((at.hostname, at.port), timeout=PATIENCE_S * 6) as client:
            line = "" if length is None else f"Content-Length: {length}\r\n"
            client.sendall(f"POST /send HTTP/1.1\r\nHost: x\r\n{line}\r\n".encode())
            assert b" 400 " in client.recv(1024)
    finally:
        sender.close()
