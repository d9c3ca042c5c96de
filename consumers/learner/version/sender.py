"""The learner's end of broadcasts: engines' reloaders ask it for a version, and it joins a group with that engine.

    POST /send {"version", "digest", "ranks"}  ->  {"host", "port", "header"}, or 404 when it does not hold that version

Invariants: a request for a version is answered at once, its group formed and fed by a thread of its own, so engines
wait for nobody but the learner; what is sent is the durable file of a committed version; an engine that never comes
costs a thread until the timeout, and learning goes on meanwhile; of a request at most LONGEST bytes are read, in
PATIENCE_S seconds. It may always refuse: the directory remains.

It asks for no key: whoever reaches `[learner] host` may receive weights. So that address belongs on the learners' own
network, as that of their process groups does."""

from __future__ import annotations

import base64
import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from millrace.infra import faults
from millrace.trainers.backends.group import open_store
from millrace.trainers.errors import CorruptCheckpoint
from millrace.trainers.weights import broadcast
from millrace.trainers.weights.tensorfile import open_file

CLOSING_S = 0.05
"""how soon the listener notices that it is closed"""
VERSIONS_HERE = 3
"""newest versions that are sent"""
MOST_RANKS = 4096
LONGEST = 4096
"""bytes of a request"""
PATIENCE_S = 10.0
"""how long a client may be silent"""

log = logging.getLogger(__name__)


class WeightSender:
    """Listens on a free port of `host` until `close`."""

    def __init__(self, host: str, timeout_s: float) -> None:
        self._host = host
        self._timeout_s = timeout_s
        self._held: dict[tuple[int, str], Path] = {}
        self._server = ThreadingHTTPServer((host, 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(CLOSING_S,), name="weight-sender", daemon=True
        )
        self._thread.start()

    def hold(self, version: int, digest: str, path: Path) -> None:
        """From now on send `path`, the weight file of a version, to whoever asks; the oldest held one is let go."""
        paths = {**self._held, (version, digest): path}
        self._held = {key: paths[key] for key in sorted(paths)[-VERSIONS_HERE:]}

    def close(self) -> None:
        """Take no more requests. What is being sent ends with the process."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def offer(self, version: int, digest: str, ranks: int) -> dict[str, Any] | None:
        """Where `ranks` receivers find the group for a version, which waits for them from now on; None: not held."""
        path = self._held.get((version, digest))
        if path is None or not 0 < ranks <= MOST_RANKS:
            return None
        try:
            header = open_file(path).header
        except CorruptCheckpoint as error:
            log.warning("version %d is not sent: %s", version, error)
            return None
        faults.point("sender.before_offer")
        store = open_store(self._host, self._timeout_s)

        def give() -> None:
            try:
                broadcast.send(store, self._host, ranks, path, self._timeout_s, fault=_fault)
            except (RuntimeError, CorruptCheckpoint, OSError) as error:
                log.warning("version %d did not reach an engine: %s", version, str(error).splitlines()[0])

        threading.Thread(target=give, name=f"send-{version}", daemon=True).start()
        return {"host": self._host, "port": store.port, "header": base64.b64encode(header).decode()}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        sender = self

        class Handler(BaseHTTPRequestHandler):
            timeout = PATIENCE_S

            def do_POST(self) -> None:
                try:
                    length = int(self.headers["Content-Length"])
                    if not 0 < length <= LONGEST:
                        raise ValueError(f"a request has 1 to {LONGEST} bytes")
                    request = json.loads(self.rfile.read(length))
                    offer = sender.offer(int(request["version"]), str(request["digest"]), int(request["ranks"]))
                except (ValueError, KeyError, TypeError):
                    self.send_error(400)
                    return
                if self.path != "/send" or offer is None:
                    self.send_error(404, "this version is not held here")
                    return
                body = json.dumps(offer).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                log.debug(format, *args)

        return Handler


def _fault(name: str) -> None:
    """The points of `millrace.trainers.weights.broadcast`, which knows no `infra`, under names that the list finds."""
    match name:
        case "joining":
            faults.point("sender.joining")
        case "between_pieces":
            faults.point("sender.between_pieces")
        case "after_last":
            faults.point("sender.after_last")
