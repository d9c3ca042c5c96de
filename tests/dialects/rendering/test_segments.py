"""Ids of text by pieces are the ids of the whole text, for every kind of tokenizer, or there are no pieces."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from millrace.dialects.rendering.base import PromptTooLong
from millrace.dialects.rendering.segments import BATCH, Segments
from millrace.dialects.rendering.words import RANGES, Words

SPECIALS = ["<|im_start|>", "<|im_end|>", "<a>", "<a><b>", "[x]", "<tool_call>"]
SPLIT = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SAMPLES = [
    "What is the weather in Zürich today?\n",
    '{"name": "add", "arguments": {"a": 3}}',
    "it's re-read  12345 \n\n",
]


def build(
    normalizer: Any = None,
    pre_tokenizer: Any = None,
    specials: list[AddedToken] | None = None,
    post: Any = None,
    model: Any = None,
) -> Tokenizer:
    core = Tokenizer(model or models.BPE())
    if normalizer is not None:
        core.normalizer = normalizer
    core.pre_tokenizer = pre_tokenizer or byte_level()
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator(SAMPLES * 5, trainer)
    for token in specials if specials is not None else [AddedToken(one, normalized=False) for one in SPECIALS]:
        core.add_special_tokens([token]) if token.special else core.add_tokens([token])
    if post is not None:
        core.post_processor = post
    return core


def byte_level() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def qwen() -> Any:
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def also_normalized() -> list[AddedToken]:
    return [
        *(AddedToken(one, normalized=False, special=True) for one in SPECIALS),
        AddedToken("wea", normalized=True),
        AddedToken("Zürich", normalized=True),
    ]


def greedy(**how: bool) -> list[AddedToken]:
    return [AddedToken(one, normalized=False, special=True, **how) for one in SPECIALS]


KINDS: dict[str, tuple[Callable[[], Tokenizer], bool]] = {
    "byte level": (build, True),
    "qwen": (lambda: build(normalizers.NFC(), qwen()), True),
    "qwen, added text": (lambda: build(normalizers.NFC(), qwen(), also_normalized()), True),
    "no normalizer, added text": (lambda: build(None, qwen(), also_normalized()), True),
    "compatible forms": (lambda: build(normalizers.Sequence([normalizers.NFKC()]), qwen()), True),
    "processed": (lambda: build(post=processors.ByteLevel(trim_offsets=False)), True),
    "lstrip": (lambda: build(specials=greedy(lstrip=True)), False),
    "rstrip": (lambda: build(specials=greedy(rstrip=True)), False),
    "whole words": (lambda: build(specials=greedy(single_word=True)), False),
    "prefix space": (lambda: build(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)), False),
    "first place": (lambda: build(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first")), False),
    "prepended": (lambda: build(normalizers.Prepend("_")), False),
    "cut": (lambda: _cut(build()), False),
}


def _cut(core: Tokenizer) -> Tokenizer:
    core.enable_truncation(8)
    return core


@cache
def made(kind: str) -> tuple[Tokenizer, Segments]:
    core = KINDS[kind][0]()
    return core, Segments(core, json.loads(core.to_str()))


Texts = st.lists(
    st.one_of(
        st.sampled_from([*SPECIALS, "<a", "><b>", "<|im_", "start|>", "wea", "Zürich", "\u0301", "e", "fi", "ﬁ", "_"]),
        st.sampled_from(["\n", "\n\n", " ", "  ", "\t", "What is", " the weather", "'s", "12", "assistant\n"]),
        st.text(max_size=6),
        st.text(st.sampled_from([chr(code) for first, last in RANGES for code in range(first, last + 1)]), max_size=6),
        st.text(st.characters(max_codepoint=0x250), max_size=8),
    ),
    max_size=14,
).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@example("<|im_start|>user\n  it's <a><b> x<a> \n<|im_end|>")
@given(text=Texts)
def test_pieces_give_the_ids_of_the_whole(kind: str, text: str):
    core, segments = made(kind)
    want = core.encode(text, add_special_tokens=False).ids
    assert segments.encode(text) == want
    assert segments.encode(text) == want, "as it is remembered"


@settings(max_examples=300, deadline=None)
@example("x<a><b>x", 3)
@example("<|im_start|><a><b><a>", 1)
@given(text=Texts, window=st.integers(1, 30))
def test_windows_cut_no_special_token(text: str, window: int):
    _, segments = made("byte level")
    whole = segments._pieces(text)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("millrace.dialects.rendering.segments.BATCH", window)
        assert segments._pieces(text) == whole


class Counted:
    """A pattern that notes how many characters one call of it may walk through."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self.most = 0

    def finditer(self, text: str, begin: int = 0, end: int = sys.maxsize) -> Iterator[re.Match[str]]:
        self.most = max(self.most, min(end, len(text)) - begin)
        return self._pattern.finditer(text, begin, end)


class Weighed:
    """A tokenizer that notes the most characters that one call of it got."""

    def __init__(self, core: Tokenizer) -> None:
        self._core = core
        self.most = 0

    def encode_batch_fast(self, texts: list[str], **how: Any) -> list[Any]:
        self.most = max(self.most, *map(len, texts))
        found: list[Any] = self._core.encode_batch_fast(texts, **how)
        return found


@pytest.mark.parametrize("letter", ["x", "\u00fc", "\n", "7 "])
def test_text_of_far_too_many_tokens_is_refused_part_by_part(letter: str):
    _, segments = made("qwen")
    with pytest.MonkeyPatch.context() as patched:
        weighed = Weighed(segments._core)
        patched.setattr(segments, "_core", weighed)
        patched.setattr(segments, "limit", BATCH // 2)
        with pytest.raises(PromptTooLong):
            segments.encode(letter * (4 * BATCH))
    assert 0 < weighed.most <= BATCH


@settings(max_examples=50, deadline=None)
@given(text=Texts.filter(bool), times=st.integers(1, 4), window=st.integers(4, 50))
def test_parts_never_refuse_what_the_limit_takes(text: str, times: int, window: int):
    core, segments = made("qwen")
    want = core.encode(text * times, add_special_tokens=False).ids
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("millrace.dialects.rendering.segments.BATCH", window)
        patched.setattr("millrace.dialects.rendering.segments.CUTS", 32 * (len(text) * times // window + 1))
        patched.setattr(segments, "limit", len(want))
        patched.setattr(segments, "_new", {})
        patched.setattr(segments, "_old", {})
        assert segments.encode(text * times) == want


def test_long_text_is_searched_a_window_at_a_time():
    _, segments = made("byte level")
    with pytest.MonkeyPatch.context() as patched:
        counted = Counted(segments._split)
        patched.setattr(segments, "_split", counted)
        assert segments._pieces("x" * (10 * BATCH) + "<a>") == ["x" * (10 * BATCH), "<a>"]
    assert 0 < counted.most <= BATCH + max(map(len, SPECIALS))


@pytest.mark.parametrize("kind", KINDS)
def test_only_tokenizers_whose_text_stands_alone_are_cut(kind: str):
    _, segments = made(kind)
    asked: list[str] = []
    fresh = segments._fresh
    segments._fresh = lambda pieces: (asked.extend(pieces), fresh(pieces))[1]  # type: ignore[method-assign]
    try:
        segments.encode("<|im_start|>one of these<|im_end|><|im_start|>")
    finally:
        segments._fresh = fresh  # type: ignore[method-assign]
    assert asked == (["one of these"] if KINDS[kind][1] else ["<|im_start|>one of these<|im_end|><|im_start|>"])


def test_what_was_said_before_is_not_tokenized_again():
    _, segments = made("qwen")
    first, second = "<|im_start|>a system prompt<|im_end|>", "<|im_start|>a question<|im_end|>"
    segments.encode(first)
    asked: list[str] = []
    fresh = segments._fresh
    segments._fresh = lambda pieces: (asked.extend(pieces), fresh(pieces))[1]  # type: ignore[method-assign]
    try:
        segments.encode(first + second)
    finally:
        segments._fresh = fresh  # type: ignore[method-assign]
    assert asked == ["a question"]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("millrace.dialects.rendering.segments.CACHE_BYTES", 4000)
    core = build()
    segments = Segments(core, json.loads(core.to_str()))
    for number in range(300):
        text = f"<a>the text of number {number}<a>"
        assert segments.encode(text) == core.encode(text, add_special_tokens=False).ids
        assert len(segments._new) + len(segments._old) < 100


@settings(max_examples=100, deadline=None)
@given(text=Texts, limit=st.integers(1, 40))
@pytest.mark.parametrize("kind", ["byte level", "qwen", "compatible forms", "lstrip", "prefix space"])
def test_nothing_that_fits_is_refused(kind: str, text: str, limit: int):
    core, segments = made(kind)
    count = len(core.encode(text, add_special_tokens=False).ids)
    segments.limit = limit
    try:
        segments.encode(text)
    except PromptTooLong:
        assert count > limit
    finally:
        segments.limit = None


def test_what_cannot_fit_is_not_tokenized():
    core = build()
    segments = Segments(core, json.loads(core.to_str()))
    segments.limit = 10
    segments._fresh = lambda pieces: pytest.fail("it was tokenized")  # type: ignore[method-assign]
    with pytest.raises(PromptTooLong):
        segments.encode("a" * 10_000)


def test_what_turns_out_too_long_is_not_tokenized_to_its_end():
    core = build()
    segments = Segments(core, json.loads(core.to_str()))
    segments.limit = 1000
    segments._longest = 1 << 20
    asked: list[str] = []
    fresh = segments._fresh
    segments._fresh = lambda pieces: (asked.extend(pieces), fresh(pieces))[1]  # type: ignore[method-assign]
    with pytest.raises(PromptTooLong):
        segments.encode("<a>".join(f"{number} " * 10_000 for number in range(40)))
    assert len(asked) < 10


@pytest.mark.parametrize("kind", ["byte level", "qwen", "compatible forms"])
def test_plain_text_is_looked_up_word_by_word(kind: str):
    core, segments = made(kind)
    assert segments._words is not None
    text = "What is the weather in Zürich today?  It's 12 degrees.\n\n\tПривет, 世界!"
    assert segments._words.encode(text) == core.encode(text, add_special_tokens=False).ids
    for unsure in ("e\u0301\u0301", "a\u00a0b", "a\u2028b", "\x1c", "\u017f", "\u212a", "\U0001f600"):
        assert segments._words.encode(f"{text}{unsure}") is None


@pytest.mark.parametrize("source", [r"\p{Lu}+", r"\w+", r"^a", r"a$", r"(a)", r"[[:alpha:]]", r"\X", r"a{"])
def test_words_are_cut_by_known_expressions_only(source: str):
    core = build(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]))  # fmt: skip
    described = json.loads(core.to_str())
    described["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = source
    assert Words(core, described).encode("plain text") is None
