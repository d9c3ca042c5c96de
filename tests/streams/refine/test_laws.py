"""The law of refine: what was found is nowhere in what it writes, and every record has one end."""

from __future__ import annotations

import itertools
import sys
from types import FrameType
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.infra.errors import DetectorError
from millrace.schemas import bounds, codec
from millrace.streams.refine.detectors.base import Detector, Hit
from millrace.streams.refine.detectors.vectorscan import Vectorscan
from millrace.testing.events import Episode, model_call
from tests.streams.refine.planted import SECRETS, ends, events, finished, fold, sent, stage

KINDS = sorted(codec.BODIES)
VECTORSCAN = Vectorscan()
RUN = settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))


def call_body(**fields: Any) -> dict[str, Any]:
    return {"call_id": "c", "name": "sh", "arguments": "{}", "response_id": None} | fields


def tool_call(arguments: bytes | str) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else arguments.decode()
    return Episode("r1").event("tool_call", call_body(arguments=text))


def written_of(event: dict[str, Any], *detectors: Detector) -> tuple[dict[str, Any], list[bytes]]:
    """(what an event became, everything that was written of it)."""
    emits, written = fold(stage(*(detectors or (VECTORSCAN,))), [sent(event)])
    (end,) = [emit for emit in emits if emit.name in ("Event", "DeadLetter")]
    return dict(end.record), written


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_secret_survives_in_no_string_of_any_event(kind, secret):
    value = SECRETS[secret]
    for event, place in events(kind, f"case {value} x"):
        emits, written = fold(stage(VECTORSCAN), [sent(event)])
        assert len(ends(emits)) == 1, place
        assert not [part for part in written if value.encode() in part], place


@pytest.mark.parametrize("header", ["source", "source-seq", "source-epoch", "traceparent"])
def test_a_secret_survives_in_no_header(header):
    event = Episode("r1").start()
    _, written = fold(stage(VECTORSCAN), [sent(event, **{header: SECRETS["github"]})])
    assert not [part for part in written if SECRETS["github"].encode() in part]


@pytest.mark.parametrize("value", [b"not avro", b"", codec.encode("Progress", {"stage": "x", "slot": 0, "time": 1})])
def test_a_secret_in_the_key_of_what_is_refused_survives_in_no_dead_letter(value):
    emits, written = fold(stage(VECTORSCAN), [(f"local/{SECRETS['github']}".encode(), value, {})])
    assert ends(emits) == ["DeadLetter"]
    assert not [part for part in written if SECRETS["github"].encode() in part]


def planted_json(secret: str) -> st.SearchStrategy[str]:
    """JSON texts with a secret somewhere: a value, a key, a duplicate key, in the depth, escaped."""
    text = st.text(max_size=8)
    escaped = "".join(f"\\u{ord(char):04x}" if n % 3 == 0 else char for n, char in enumerate(secret))
    leaf = st.one_of(text, st.integers(-(2**40), 2**40), st.floats(allow_nan=False, allow_infinity=False), st.none())
    other = st.recursive(leaf, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3))
    dumped = other.map(lambda value: orjson.dumps(value).decode())
    spot = st.sampled_from([f'"{secret}"', f'"{escaped}"', f'"a {secret} b"'])
    node = st.recursive(
        spot,
        lambda inner: st.one_of(
            st.tuples(dumped, inner, dumped).map(lambda t: f"[{t[0]}, {t[1]},{t[2]}]"),
            st.tuples(dumped, inner).map(lambda t: f'{{"k": {t[0]}, "s" : {t[1]}}}'),
            st.tuples(dumped, inner).map(lambda t: f'{{"a":{t[1]},"a":{t[0]}}}'),
            st.tuples(dumped, spot).map(lambda t: f"{{{t[1]}: {t[0]}, {t[1]}:1}}"),
        ),
        max_leaves=5,
    )
    return node.map(lambda text: f"[{text}]")


@pytest.mark.parametrize("secret", ["github", "letters", "session", "card"])
@given(data=st.data())
@RUN
def test_a_secret_survives_nowhere_in_a_document(secret, data):
    text = data.draw(planted_json(SECRETS[secret]))
    event, written = written_of(tool_call(text))
    assert not [part for part in written if SECRETS[secret].encode() in part]
    assert SECRETS[secret] not in str(orjson.loads(codec.decode_body("tool_call", event["body"])["arguments"]))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
TEXTS = st.one_of(
    st.text(),
    JSON.map(lambda value: orjson.dumps(value).decode()),
    st.tuples(st.sampled_from("[{"), st.integers(1, 3000)).map(lambda t: t[0] * t[1]),
    st.integers(1, 3000).map(lambda n: "[" * n + "]" * n),
    st.integers(1, 600).map(lambda n: '{"a":' * n + "1" + "}" * n),
)


@given(kind=st.sampled_from(KINDS), target=st.integers(0, 40), text=TEXTS)
@settings(RUN, max_examples=300)
def test_any_string_anywhere_ends_in_one_place(kind, target, text):
    found = [event for n, (event, _) in enumerate(events(kind, text)) if n == target]
    for event in found:
        emits, _ = fold(stage(VECTORSCAN), [sent(event)])
        assert len(ends(emits)) == 1
        for emit in emits:
            codec.encode(emit.name, emit.record)


@given(value=JSON)
@RUN
def test_what_is_clean_stays_as_it_came(value):
    event = tool_call(orjson.dumps([value]))
    out, _ = written_of(event, Nothing())
    assert out["body"] == event["body"]


class Nothing(Detector):
    """Finds nothing."""

    name = "nothing"

    def version(self) -> str:
        return "nothing-1"

    def scan(self, text: bytes) -> list[Hit]:
        return []


class Every(Detector):
    """Finds each `x1x`."""

    name = "every"

    def version(self) -> str:
        return "every-1"

    def scan(self, text: bytes) -> list[Hit]:
        hits, at = [], text.find(b"x1x")
        while at >= 0:
            hits.append(Hit(at, at + 3, "x", "every", True))
            at = text.find(b"x1x", at + 3)
        return hits


def choice(content: str | None, logprobs: Any) -> bytes:
    return orjson.dumps({"choices": [{"message": {"content": content}, "logprobs": logprobs}]})


SPLITS = st.lists(st.integers(1, len(SECRETS["github"]) - 1), max_size=12)


@given(splits=SPLITS, repeated=st.booleans(), legacy=st.booleans())
@RUN
def test_log_probabilities_spell_no_secret(splits, repeated, legacy):
    secret = SECRETS["github"]
    cuts = [0, *sorted(set(splits)), len(secret)]
    parts = [secret[a:b] for a, b in itertools.pairwise(cuts)]
    rows = [{"token": part, "bytes": list(part.encode()), "logprob": -0.1, "top_logprobs": []} for part in parts]
    logprobs = {"tokens": parts, "token_logprobs": [-0.1] * len(parts)} if legacy else {"content": rows}
    reply = choice(f"it is {secret}" if repeated else None, logprobs)
    event, written = written_of(Episode("r1").event("model_call", model_call("a", reply=reply)))
    body = codec.decode_body("model_call", event["body"])
    assert orjson.loads(body["response"])["choices"][0]["logprobs"] is None
    assert event["governance"]["eligibility"] == "audit_only"
    assert not body["trainable"]
    assert not [part for part in written if secret.encode() in part]


def test_log_probabilities_of_a_clean_reply_stay():
    rows = [{"token": "hel", "bytes": [104], "logprob": -0.1, "top_logprobs": [{"token": "x", "logprob": -3}]}]
    reply = choice("hello", {"content": rows})
    event = Episode("r1").event("model_call", model_call("a", reply=reply))
    assert written_of(event)[0]["body"] == event["body"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"password": "Tr0ub4dor-and-3-horses"},
        {"aws_secret_access_key": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYzzzzzzzKEY"},
        {"deep": [{"api_key": "a8b7c6d5e4f3a2b1"}]},
        {"card_number": 4111111111111111},
        {"card_number": "4111111111111111"},
    ],
)
def test_a_key_is_context_for_its_value(arguments):
    ((name, value),) = arguments["deep"][0].items() if "deep" in arguments else arguments.items()
    event, written = written_of(tool_call(orjson.dumps(arguments)))
    assert not [part for part in written if str(value).encode() in part]
    assert name in codec.decode_body("tool_call", event["body"])["arguments"]
    (finding,) = [f for f in event["governance"]["findings"] if f["leaf"].endswith(f"/{name}")][:1]
    assert finding["start"] == 0 or name == "aws_secret_access_key"


DEEP = {
    "lists": "[" * 600 + "]" * 600,
    "just too deep": "[" * (bounds.DEPTH + 1) + "]" * (bounds.DEPTH + 1),
    "deeper than any parser goes": "[" * 5000 + "]" * 5000,
    "maps": '{"a":' * 600 + "1" + "}" * 600,
}


@pytest.mark.parametrize("case", DEEP)
@pytest.mark.parametrize("kind", ["tool_call", "model_call", "episode_started"])
def test_what_is_too_deep_is_blanked(kind, case):
    for event, _ in events(kind, DEEP[case]):
        emits, _ = fold(stage(VECTORSCAN), [sent(event)])
        assert len(ends(emits)) == 1
    episode = Episode("r1", task=DEEP[case])
    out, written = written_of(episode.start())
    assert (out["governance"]["reason"], out["governance"]["redaction"]) == ("too_deep", "failed")
    assert not [part for part in written if b"[[[[" in part or b'{"a":{"a"' in part]


def test_as_deep_as_the_bound_is_looked_into():
    text = "[" * bounds.DEPTH + f'"{SECRETS["github"]}"' + "]" * bounds.DEPTH
    out, _ = written_of(tool_call(text))
    assert out["governance"]["redaction"] == "applied"


def test_too_many_leaves_are_blanked(monkeypatch):
    monkeypatch.setattr(bounds, "LEAVES", 100)
    out, _ = written_of(tool_call(orjson.dumps(["word"] * 101)))
    assert out["governance"]["reason"] == "too_many_leaves"
    assert b"word" not in out["body"]


def test_too_many_hits_are_blanked_and_names_stay(monkeypatch):
    monkeypatch.setattr(bounds, "HITS", 50)
    out, _ = written_of(tool_call(orjson.dumps(["x1x"] * 51)), Every())
    assert (out["governance"]["reason"], out["group"]) == ("too_many_hits", "r1")
    assert b"x1x" not in out["body"]


def lines_run(count: int) -> int:
    """Lines of Python that refine runs for a list with so many secrets: work, without a clock."""
    event, steps = tool_call(orjson.dumps([{"k": "x1x"} for _ in range(count)])), 0

    def step(frame: FrameType, what: str, _: object) -> Any:
        nonlocal steps
        steps += what == "line"
        return step

    refine, records = stage(Every()), [sent(event)]
    before = sys.gettrace()
    sys.settrace(step)
    try:
        fold(refine, records)
    finally:
        sys.settrace(before)
    return steps


def test_work_is_linear_in_the_secrets_of_an_event():
    one, two, four = (lines_run(count) for count in (500, 1000, 2000))
    assert (four - two) < 2.2 * (two - one)


class Failing(Detector):
    """Fails on `boom`; finds GitHub tokens."""

    name = "failing"

    def version(self) -> str:
        return "failing-1"

    def scan(self, text: bytes) -> list[Hit]:
        if b"boom" in text:
            raise DetectorError("boom")
        return VECTORSCAN.scan(text)


def test_names_are_read_alone_when_the_text_cannot_be():
    episode = Episode("r1", group=f"case {SECRETS['phone']}", task="boom")
    out, written = written_of(episode.start(), Failing())
    assert out["governance"]["reason"] == "detectors_failed"
    assert out["root_trajectory"] == "r1"
    assert not [part for part in written if SECRETS["phone"].encode() in part or b"boom" in part]


def test_an_event_whose_names_nobody_can_read_is_a_dead_letter():
    emits, written = fold(stage(Failing()), [sent(Episode("r1", group="boom").start())])
    assert ends(emits) == ["DeadLetter"]
    assert not [part for part in written if b"boom" in part]


@pytest.mark.parametrize("field", ["task_id", "group"])
def test_a_name_beyond_its_bound_is_a_dead_letter(field):
    body = codec.decode_body("episode_started", Episode("r1").start()["body"]) | {"task_id": "x"}
    event = Episode("r1").start()
    if field == "group":
        event["group"] = "x" * (bounds.NAME_BYTES + 1)
    else:
        body["task_id"] = "x" * (bounds.NAME_BYTES + 1)
    emits, _ = fold(stage(), [sent(finished(event, "episode_started", body))])
    assert [emit.record["reason"] for emit in emits if emit.name == "DeadLetter"] == ["out_of_bounds"]
