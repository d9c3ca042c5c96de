"""Refine of requests that leave out what an earlier one said: the same text goes on, and nothing may be used that could
not be used if every request were whole."""

from __future__ import annotations

from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from millrace.producers.gateway.sessions.request_trail import RequestTrail
from millrace.schemas import codec
from millrace.schemas.requests import RequestStore, outline_request
from millrace.testing.events import Episode
from tests.streams.refine.planted import SECRETS, fold, sent, stage
from tests.streams.refine.test_laws import RUN, VECTORSCAN

FILL = "x" * 600
TEXTS = st.sampled_from(
    ["hello", "the password is", "next", *(f"see {value} there" for value in SECRETS.values()), *SECRETS.values()]
)
MESSAGES = st.lists(TEXTS, min_size=1, max_size=3)
CALLS = st.lists(st.tuples(st.integers(0, 6), MESSAGES, st.sampled_from(["", "tokens"])), min_size=2, max_size=7)


def bodies(calls: list[tuple[int, list[str], str]]) -> list[bytes]:
    """Requests of a conversation whose calls go on from some place of what was said."""
    said: list[list[str]] = []
    for back, texts, _ in calls:
        before = said[-1 - back % len(said)] if said else [FILL]
        said.append([*before, *texts])
    return [orjson.dumps({"messages": [{"role": "user", "content": text} for text in texts]}) for texts in said]


def governed(calls: list[tuple[int, list[str], str]], *, short: bool) -> tuple[list[tuple[bytes | None, str]], int]:
    """(whole request or None, eligibility) of each call behind refine, and how many requests left something out."""
    episode, trail, events, count = Episode("r1"), RequestTrail(), [], 0
    events.append(episode.start())
    for at, (body, call) in enumerate(zip(bodies(calls), calls, strict=True)):
        outline = outline_request(body)
        request, base, kept = trail.compress(body, outline) if short else (body, None, {})
        count += base is not None
        tokens: dict[str, Any] = {} if call[2] else {"prompt": [], "output": []}
        changed = {"request": request, "request_base": base, "request_kept": kept}
        event = episode.call(f"r{at}", lineage=f"l{at}", changed=changed, **tokens)
        trail.add(event["id"], outline)
        events.append(event)
    emits, _ = fold(stage(VECTORSCAN), [sent(event) for event in events])
    store, out = RequestStore(), []
    for emit in emits:
        event: Any = emit.record
        if emit.name == "Event" and event["kind"] == "model_call":
            fields = codec.decode_body("model_call", event["body"])
            out.append((store.add(event["id"], fields), event["governance"]["eligibility"]))
    return out, count


@RUN
@given(CALLS)
def test_what_is_left_out_is_governed_like_what_is_not(calls: list[tuple[int, list[str], str]]) -> None:
    (whole, _), (short, _) = governed(calls, short=False), governed(calls, short=True)
    assert [text for text, _ in whole] == [text for text, _ in short]
    for (_, wide), (_, narrow) in zip(whole, short, strict=True):
        assert wide == narrow or narrow == "audit_only"


def test_a_call_that_leaves_a_secret_out_is_withheld() -> None:
    secret = f"see {SECRETS['github']} there"
    found, count = governed([(0, [secret], "tokens"), (0, ["and now"], "tokens")], short=True)
    assert count == 1
    assert [eligibility for _, eligibility in found] == ["audit_only", "audit_only"]
    assert SECRETS["github"].encode() not in (found[1][0] or b"")
    assert b"and now" in (found[1][0] or b"")
