"""What is encoded is read as what it says, and what is taken out is the encoded span."""

from __future__ import annotations

import base64
import json
import random
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.streams.refine.detectors.base import Hit
from millrace.streams.refine.forms.decode import fold, substitutions
from millrace.streams.refine.forms.reading import Reading
from millrace.streams.refine.forms.view import DecodedText
from millrace.streams.refine.leaves import Buffer
from millrace.streams.refine.strings import String

WORD = b"swordfish-0123-XYZ"
"""what the detector of these tests looks for"""


def spans(text: str) -> list[str]:
    """What of a text is taken out by a detector that knows one word."""
    buffer = Buffer()
    buffer.add([String(("body", "content"), text, True)])
    reading = Reading(buffer)
    hits = reading.hits(detect(reading.text))
    return [buffer.text[hit.start : hit.end].decode() for hit in hits]


def detect(text: bytes) -> list[Hit]:
    out, at = [], text.find(WORD)
    while at >= 0:
        out.append(Hit(at, at + len(WORD), "word", "test", True))
        at = text.find(WORD, at + 1)
    return out


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def percent(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode())


TEXT = WORD.decode()
LETTERS = str.maketrans("aceopxyXYZ", "\u0430\u0441\u0435\u043e\u0440\u0445\u0443\u0425\u03a5\u0396")
FORMS = {
    "base64": b64(TEXT),
    "base64 without padding": b64(TEXT + "!").rstrip("="),
    "base64 for addresses": base64.urlsafe_b64encode(f"???>>>{TEXT}".encode()).decode(),
    "base64 of base64": b64(b64(TEXT)),
    "base64 of a long text": b64("word " * 200 + TEXT + " word" * 200),
    "hexadecimal": WORD.hex(),
    "hexadecimal, capital": WORD.hex().upper(),
    "percent": percent(TEXT),
    "percent here and there": TEXT.replace("-", "%2D"),
    "percent of base64": percent(b64(TEXT)),
    "escapes": "".join(f"\\u{ord(char):04x}" for char in TEXT),
    "escapes of bytes": "".join(f"\\x{ord(char):02x}" for char in TEXT),
    "full width": "".join(chr(ord(char) + 0xFEE0) for char in TEXT),
    "other alphabets": TEXT.translate(LETTERS),
    "zero width": "\u200b".join(TEXT),
    "direction marks": TEXT.replace("-", "-\u202e\u2066"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", ["{}", "the key is {} and stays", '{{"deep": ["a", "{}"]}}'])
def test_an_encoded_value_is_taken_out_whole(form, place):
    value = FORMS[form]
    text = place.format(json.dumps(value, ensure_ascii=False)[1:-1] if place.startswith("{{") else value)
    assert spans(text) == [value]


def test_base64_in_lines_is_read_as_one_text():
    lines = base64.encodebytes(b"x" * 50 + WORD + b" and more" * 20).decode()
    (span,) = spans(f"body:\n{lines}")
    assert span == lines[: lines.index("\n", 80)]


def test_base64_behind_a_word_is_found():
    value = b64(TEXT)
    assert all(value[4:] in span for span in spans(f"key-{value} id_{value}"))
    assert len(spans(f"key-{value} id_{value}")) == 2


def test_a_value_that_is_decoded_and_plain_is_taken_once_each():
    assert spans(f"{TEXT} {b64(TEXT)}") == [TEXT, b64(TEXT)]


def test_text_in_what_is_mostly_none_is_taken_where_it_stands():
    noise = bytes(range(128, 256)) * 4
    run = base64.b64encode(noise[:300] + b"this is the value: " + WORD + b"; what follows" + noise).decode()
    (span,) = spans(run)
    assert span in run
    assert len(span) < 120


@pytest.mark.parametrize(
    "value",
    [
        [TEXT[:6], TEXT[6:12], TEXT[12:]],
        [{"type": "text", "text": f"take {TEXT[:6]}"}, {"type": "text", "text": f"{TEXT[6:]} and go"}],
        {"first": TEXT[:6], "second": TEXT[6:]},
        [b64(TEXT)[:9], b64(TEXT)[9:]],
    ],
)
def test_a_value_that_is_split_over_strings_is_taken_from_each(value):
    text = json.dumps(value)
    pieces = spans(text)
    assert len([piece for piece in pieces if piece != "text"]) >= 2
    rest = text
    for piece in pieces:
        rest = rest.replace(piece, "")
    assert not any(part in rest for part in ("sword", "0123", b64(TEXT)[9:]))


@pytest.mark.parametrize(
    "text",
    [
        "plain words of no interest, 100 % of them",
        "d0d0caca" * 8,
        "0190f3a2-7c1b-7d3e-8f00-1234567890ab",
        base64.b64encode(random.Random(1).randbytes(6000)).decode(),
        "test_settings_know_every_kind_that_is_labelled_only",
        "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u4f60\u597d",
    ],
)
def test_a_text_without_candidates_is_read_as_it_is(text):
    buffer = Buffer()
    buffer.add([String(("body", "content"), text, True)])
    assert Reading(buffer).text == buffer.text


@given(st.lists(st.one_of(st.text(), st.sampled_from([*FORMS.values(), "\\", '\\"', "%4", "=", "\n\x00\n"]))))
def test_substitutions_ascend_and_never_grow(parts):
    text = "".join(parts).encode("utf-8", "replace")
    at = 0
    for lo, hi, value in substitutions(text):
        assert at <= lo < hi <= len(text)
        assert len(value) <= hi - lo
        at = hi


@given(st.lists(st.one_of(st.text(), st.sampled_from([*FORMS.values(), "\\", '\\"', "%4", "\n\x00\n"]))), st.data())
def test_a_span_of_a_view_comes_from_spans_that_cover_it(parts, data):
    base = "".join(parts).encode("utf-8", "replace")
    view = DecodedText(base)
    view.substitute(substitutions(base))
    text = view.text
    assert len(text) <= 3 * len(base) + 3
    start = data.draw(st.integers(0, max(0, len(text) - 1)))
    end = data.draw(st.integers(start, len(text)))
    origins = view.spans(start, end)
    assert origins == sorted(origins)
    assert all(0 <= lo <= hi <= len(base) for lo, hi in origins)
    if start < end <= len(base):
        assert origins == [(start, end)]


@given(st.characters())
def test_a_character_folds_to_ascii_or_to_nothing(char):
    assert fold(char) is None or (fold(char).isascii() and len(fold(char)) <= 1)
    assert not char.isascii() or fold(char) in (None, char, "")


@given(quoted=st.text(alphabet="abcXYZ019 /&=?-", min_size=1))
def test_a_query_is_read_as_what_it_says(quoted):
    text = f"https://example.com/?q={quote(f'{quoted} {TEXT}', safe='')}"
    assert any("0123" in span for span in spans(text))
