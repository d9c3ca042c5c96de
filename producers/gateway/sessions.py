"""All episodes of one gateway: started ones, unsolicited ones, ended ones that may yet be rewarded.

Invariants: a session's key is derived from its id by a secret of this gateway's folder, so that keys outlive a restart;
live sessions are bounded by the idle timeout, ended ones by a count; a session is rebuilt from the capture log with the
same folds that built it; an unsolicited call joins the episode whose conversation it goes on from, else it begins one.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from producers.capture.log import CaptureLog
from producers.gateway import keys
from producers.gateway.session import Session, begun, to_reply
from producers.gateway.wire import parse_any
from schemas import codec
from schemas.ids import new_id

KEY_PREFIX = "mr-"
ENDED = 20_000
"""ended sessions that a late reward may still name"""


class Sessions:
    """`folder` keeps the secret of the session keys."""

    def __init__(self, folder: Path, policy: str) -> None:
        self.policy = policy
        self.live: dict[str, Session] = {}
        self.ended: OrderedDict[str, Session] = OrderedDict()
        self._secret = _secret(folder / "secret")
        self._replies: dict[tuple[str, bytes], Session] = {}
        self._aliases: dict[tuple[str, str], Session] = {}
        self._attempts: dict[tuple[str, str], Session] = {}

    # ------------------------------------------------------------------ keys

    def key_of(self, session: Session) -> str:
        """The API key of one session."""
        return f"{KEY_PREFIX}{session.id}.{self._sign(session.id)}"

    def id_of(self, key: str) -> str | None:
        """The session id behind a key; None for any key that this gateway did not mint."""
        if not key.startswith(KEY_PREFIX):
            return None
        id, _, signature = key[len(KEY_PREFIX) :].partition(".")
        return id if hmac.compare_digest(signature.encode(), self._sign(id).encode()) else None

    def _sign(self, id: str) -> str:
        return hmac.new(self._secret, id.encode(), hashlib.sha256).hexdigest()[:32]

    # ------------------------------------------------------------------ life

    def get(self, id: str) -> Session | None:
        """A session, live or ended."""
        return self.live.get(id) or self.ended.get(id)

    def add(self, session: Session) -> None:
        """A session begins."""
        self.live[session.id] = session
        if session.parent is None:
            self._attempts[(session.tenant, session.attempt)] = session
        if session.alias is not None:
            self._aliases[(session.tenant, session.alias)] = session

    def retire(self, session: Session) -> None:
        """A session ended: keep what a late reward needs."""
        self.live.pop(session.id, None)
        for digest in session.digests:
            if self._replies.get((session.tenant, digest)) is session:
                del self._replies[(session.tenant, digest)]
        if session.alias is not None and self._aliases.get((session.tenant, session.alias)) is session:
            del self._aliases[(session.tenant, session.alias)]
        if self._attempts.get((session.tenant, session.attempt)) is session:
            del self._attempts[(session.tenant, session.attempt)]
        session.shrink()
        self.ended[session.id] = session
        while len(self.ended) > ENDED:
            self.ended.popitem(last=False)

    def attempted(self, tenant: str, attempt: str) -> Session | None:
        """The live session of an attempt."""
        return self._attempts.get((tenant, attempt))

    def idle(self, timeout_s: float) -> list[Session]:
        """Live sessions that nothing happened in for so long."""
        limit = time.monotonic() - timeout_s
        return [session for session in self.live.values() if session.touched < limit and not session.busy]

    # ------------------------------------------------------------------ unsolicited calls

    def named(self, tenant: str, alias: str) -> Session | None:
        """The unsolicited session that a client gave a name of its own."""
        return self._aliases.get((tenant, alias))

    def continued(self, tenant: str, messages: Sequence[Mapping[str, Any]], digests: Sequence[bytes]) -> Session | None:
        """The unsolicited session whose conversation these messages go on from."""
        for count in range(len(messages), 0, -1):
            if messages[count - 1]["role"] == "assistant":
                found = self._replies.get((tenant, digests[count]))
                if found is not None:
                    return found
        return None

    def replied(self, session: Session, digest: bytes | None) -> None:
        """A reply was recorded under this digest."""
        if digest is not None and not session.granted:
            session.digests.append(digest)
            self._replies[(session.tenant, digest)] = session

    def unsolicited(self, tenant: str, alias: str | None, awaits: Sequence[str], reward_deadline_ms: int) -> Session:
        """A new episode that nobody asked for. Its group is its own root trajectory."""
        id = new_id()
        start = {
            "task_id": id,
            "task": "",
            "ticket": None,
            "group_size": 1,
            "sample": 0,
            "min_version": 0,
            "deadline": None,
            "awaits": list(awaits),
            "reward_deadline_ms": reward_deadline_ms,
            "mode": "online",
            "versions": {"agent": "", "harness": "", "prompt": "", "tools": {}},
        }
        return Session(id, tenant, self.policy, id, id, id, "train", start, alias=alias)

    # ------------------------------------------------------------------ restart

    def rebuild(self, log: CaptureLog) -> int:
        """Take up where the log ends; returns the number of live sessions."""
        state: OrderedDict[str, bool] = OrderedDict()
        for kept in log.read():
            trajectory = kept.entry.headers["trajectory"]
            state[trajectory] = state.get(trajectory, False) or kept.entry.headers["kind"] == "episode_ended"
        over = [trajectory for trajectory, ended in state.items() if ended][-ENDED:]
        wanted = {trajectory for trajectory, ended in state.items() if not ended}.union(over)
        for kept in log.read():
            if kept.entry.headers["trajectory"] in wanted:
                self._refold(codec.decode_as("Event", kept.entry.value))
        for session in [session for session in self.live.values() if session.ended]:
            self.retire(session)
        return len(self.live)

    def _refold(self, event: Mapping[str, Any]) -> None:
        kind, body = event["kind"], codec.decode_body(event["kind"], event["body"])
        if kind == "episode_started":
            self.add(begun(event, body))
        session = self.live.get(event["trajectory"])
        if session is None:
            return  # its start lies in files that are gone, or was never written: nothing can be added to it
        session.followed(kind, event["step"], event["hash"])
        if kind == "model_call":
            self._recall(session, body)
        elif kind == "reward":
            session.rewards.add(body["reward_id"])

    def _recall(self, session: Session, call: Mapping[str, Any]) -> None:
        request = parse_any(call["request"])
        messages = request.plain()
        answer = orjson.loads(call["response"])
        message = next(c["message"] for c in answer["choices"] if c["index"] == call["choice"])
        session.said = message.get("content") or session.said
        digests = keys.chain(messages, request.tools)
        digest = session.lineages.apply(call, messages, digests, keys.request_hash(call["request"]), to_reply(message))
        self.replied(session, digest)


def _secret(path: Path) -> bytes:
    if not path.exists():
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(os.urandom(32))
    return path.read_bytes()
