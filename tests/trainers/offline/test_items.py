"""Each shape of a row becomes the tokens that an engine would see; every other row is refused with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from millrace.apps.demo import tiny
from millrace.trainers.errors import BadConfiguration, BadData
from millrace.trainers.offline.items import Data, Make, demonstration, label, load, pair, prompt
from millrace.trainers.offline.rows import DataRow, read
from millrace.trainers.offline.text import Encoder
from tests.support import lessons

PROMPT = tiny.encode("21")
ANSWER = [*tiny.encode("12")[2:-1], tiny.EOS]
USER, REPLY = {"role": "user", "content": "21"}, {"role": "assistant", "content": "12"}


def items(row: dict[str, Any], make: Make, encoder: Encoder) -> list[tuple[list[int], list[int]]]:
    data = load([DataRow("x:1", row)], make, encoder, vocabulary=32, longest=64, strict=True)
    return [(reading.tokens.tolist(), reading.mask.tolist()) for reading in data.items[0].readings]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, REPLY]},
        {"prompt": "<bos>s21=", "completion": "12"},
        {"prompt": "<bos>s21=", "completion": "12<eos>"},
        {"prompt": [USER], "completion": "12"},
        {"prompt": [USER], "completion": [REPLY]},
        {"prompt": PROMPT, "completion": ANSWER},
        {"tokens": PROMPT + ANSWER, "mask": [0] * 5 + [1] * 3},
    ],
)
def test_demonstrations_of_every_shape_are_equal(row: dict[str, Any], encoder: Encoder) -> None:
    assert items(row, demonstration, encoder) == [(PROMPT + ANSWER, [0] * len(PROMPT) + [1] * len(ANSWER))]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": "12", "rejected": "21"},
        {"chosen": [USER, REPLY], "rejected": [USER, {"role": "assistant", "content": "21"}]},
        {"prompt": "<bos>s21=", "chosen": "12", "rejected": "21"},
    ],
)
def test_pairs_of_every_shape_are_equal(row: dict[str, Any], encoder: Encoder) -> None:
    worse = [*tiny.encode("21")[2:-1], tiny.EOS]
    marks = [0] * len(PROMPT) + [1] * len(ANSWER)
    assert items(row, pair, encoder) == [(PROMPT + ANSWER, marks), (PROMPT + worse, marks)]
    data = load([DataRow("x:1", row)], pair, encoder, vocabulary=32, longest=64)
    assert [sample.reward for sample in data.items[0].samples(seq=3)] == [1.0, 0.0]


@pytest.mark.parametrize("row", [{"prompt": "<bos>s21="}, {"prompt": [USER]}, {"messages": [USER, REPLY]}])
def test_prompts_end_where_the_reply_begins(row: dict[str, Any], encoder: Encoder) -> None:
    assert items(row, prompt, encoder) == [(PROMPT, [0] * len(PROMPT))]


def test_every_reply_of_a_conversation_trains(encoder: Encoder) -> None:
    ((tokens, mask),) = items({"messages": [USER, REPLY, USER, REPLY]}, demonstration, encoder)
    # The template begins a conversation with one BOS, whatever number of turns follows.
    turn = PROMPT[1:] + ANSWER
    assert tokens == [tiny.BOS, *turn, *turn]
    assert mask == [0] + ([0] * len(PROMPT[1:]) + [1] * len(ANSWER)) * 2


def test_what_a_template_writes_after_the_end_token_does_not_train(model: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] + m['content'] + eos_token + '=' }}{% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}"
    )
    tokenizer.save_pretrained(str(tmp_path))
    row = {"messages": [{"role": "f", "content": "1"}, {"role": "assistant", "content": "2"}]}
    ((tokens, mask),) = items(row, demonstration, Encoder(tmp_path))
    text = tokenizer.convert_ids_to_tokens(tokens)
    assert text == ["f", "1", "<eos>", "=", "a", "2", "<eos>", "="]
    assert mask == [0, 0, 0, 0, 0, 1, 1, 0]


@pytest.mark.parametrize("ends", [None, 31, [7, 31]])
@pytest.mark.parametrize("close", ["<turn>\\n", "<turn>", "<turn> \\n\\n"])
def test_the_newline_behind_an_end_of_turn_does_not_train(close: str, ends: Any, model: Path, tmp_path: Path) -> None:
    """As Gemma's templates write it: the end of a turn is a special token, and not the one that ends a text."""
    core = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate("ufa12\n ")}, merges=[]))
    core.add_special_tokens(["<eos>", "<turn>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] + m['content'] + '" + close + "' }}{% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}"
    )
    tokenizer.save_pretrained(str(tmp_path))
    if ends is not None:
        turn = tokenizer.convert_tokens_to_ids("<turn>")
        ids = [turn if one == 31 else one for one in ends] if isinstance(ends, list) else turn
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    row = {"messages": [USER, REPLY, USER, {"role": "assistant", "content": "1\n"}]}
    ((tokens, mask),) = items(row, demonstration, Encoder(tmp_path))
    words = tokenizer.convert_ids_to_tokens(tokens)
    blank = close.removeprefix("<turn>").replace("\\n", "\n")
    prompt, template = ["u", "2", "1", "<turn>", *blank, "a"], list(blank)
    assert words == [*prompt, "1", "2", "<turn>", *template, *prompt, "1", "\n", "<turn>", *template]
    marks = [
        (prompt, 0),
        ("12", 1),
        (["<turn>"], 1),
        (template, 0),
        (prompt, 0),
        ("1\n", 1),
        (["<turn>"], 1),
        (template, 0),
    ]
    assert mask == [bit for part, bit in marks for _ in part]


def test_a_template_that_rewrites_what_was_said_is_refused(model: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    tokenizer.chat_template = (
        "{% for m in messages %}{% if loop.last or m['role'] != 'assistant' %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    tokenizer.save_pretrained(str(tmp_path))
    with pytest.raises(BadData, match="row of its own"):
        items({"messages": [USER, REPLY, USER, REPLY]}, demonstration, Encoder(tmp_path))


BAD = [
    ({}, "no known shape"),
    ({"prompt": "x"}, "no known shape: it has prompt"),
    ({"messages": "hello"}, "messages must be"),
    ({"messages": [USER]}, "no assistant message"),
    ({"messages": [{"role": "system", "content": "x"}, REPLY]}, "chat template refuses"),
    ({"prompt": "", "completion": "12"}, "first token"),
    ({"prompt": 3, "completion": "12"}, "a prompt is text"),
    ({"prompt": "a", "completion": 3}, "a reply is text"),
    ({"tokens": [1, 2], "mask": [0]}, "differ in length"),
    ({"tokens": [1, 2.5], "mask": [0, 1]}, "must be lists"),
    ({"tokens": [1, 2], "mask": [0, 2]}, "must be lists"),
    ({"tokens": [1, 2], "mask": [0, 0]}, "nothing of it trains"),
    ({"tokens": [1, 99], "mask": [0, 1]}, "outside the vocabulary"),
    ({"tokens": [1, -1], "mask": [0, 1]}, "outside the vocabulary"),
    ({"tokens": [1] * 65, "mask": [0] + [1] * 64}, "too long"),
]


@pytest.mark.parametrize(("row", "reason"), BAD)
def test_what_is_no_demonstration_is_refused(row: dict[str, Any], reason: str, encoder: Encoder) -> None:
    with pytest.raises(BadData, match=rf"^x:1: .*{reason}"):
        items(row, demonstration, encoder)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "x", "chosen": "1"}, "no known shape"),
        ({"prompt": "<bos>s", "chosen": "1", "rejected": "1"}, "are the same"),
        ({"chosen": [USER, REPLY], "rejected": [REPLY, USER]}, "last message alone"),
        ({"chosen": "1", "rejected": "2"}, "messages must be"),
    ],
)
def test_what_is_no_pair_is_refused(row: dict[str, Any], reason: str, encoder: Encoder) -> None:
    with pytest.raises(BadData, match=reason):
        items(row, pair, encoder)


def test_refused_rows_are_counted_and_named(tmp_path: Path, encoder: Encoder) -> None:
    path = lessons.write(tmp_path / "x.jsonl", [{"messages": [USER, REPLY]}, {"a": 1}, {"b": 1}, {"messages": [USER]}])
    heard: list[str] = []
    data = load(
        read(path), demonstration, encoder, vocabulary=32, longest=64, on_reject=lambda where, why: heard.append(where)
    )
    assert heard == [f"{path}:2", f"{path}:3", f"{path}:4"]
    assert data.refused == {"no known shape": 2, "no assistant message to learn from": 1}
    with pytest.raises(BadData, match=rf"{path}:2: no known shape"):
        load(read(path), demonstration, encoder, vocabulary=32, longest=64, strict=True)
    with pytest.raises(BadData, match="no row to learn from"):
        load([DataRow("x:1", {})], demonstration, encoder, vocabulary=32, longest=64)


def test_the_digest_tells_data_apart(encoder: Encoder) -> None:
    def digest(*rows: dict[str, Any]) -> str:
        data: Data = load(
            [DataRow("x", row) for row in rows], demonstration, encoder, vocabulary=32, longest=64, strict=True
        )
        return data.digest

    one, other = {"tokens": [1, 2], "mask": [0, 1]}, {"tokens": [1, 3], "mask": [0, 1]}
    assert digest(one, other) == digest(one, other) != digest(other, one)


def test_rated_replies_keep_their_label(encoder: Encoder) -> None:
    row = {"prompt": [USER], "completion": "12"}

    def loaded(*labels: Any) -> Data:
        rows = [DataRow("x:1", {**row, "label": value}) for value in labels]
        return load(rows, demonstration, encoder, vocabulary=32, longest=64, rate=label)

    data = loaded(True, False, 1, 0.0, "true", None, 2)
    assert [item.reward for item in data.items] == [1.0, 0.0, 1.0, 0.0]
    assert [item.samples(0)[0].reward for item in data.items] == [1.0, 0.0, 1.0, 0.0]
    assert data.refused == {"no label": 3}
    assert loaded(True).digest == loaded(1).digest != loaded(False).digest


def test_a_model_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match="no tokenizer"):
        Encoder(tmp_path)


def test_masks_are_bytes(encoder: Encoder) -> None:
    data = load([DataRow("x", {"messages": [USER, REPLY]})], demonstration, encoder, vocabulary=32, longest=64)
    reading = data.items[0].readings[0]
    assert (reading.tokens.dtype, reading.mask.dtype) == (np.int32, np.uint8)


@pytest.mark.parametrize("content", [None, 3, {"type": "text"}, ["x"]])
def test_content_that_a_template_cannot_join_refuses_its_row_alone(content: Any, encoder: Encoder) -> None:
    heard: list[tuple[str, str]] = []
    odd = DataRow("x:1", {"messages": [{"role": "user", "content": content}, REPLY]})
    data = load(
        [odd, DataRow("x:2", {"messages": [USER, REPLY]})],
        demonstration,
        encoder,
        vocabulary=32,
        longest=64,
        on_reject=lambda where, reason: heard.append((where, reason)),
    )
    assert [item.where for item in data.items] == ["x:2"]
    ((where, reason),) = heard
    assert where == "x:1"
    assert "the chat template refuses it" in reason
    assert ("content of message 0 is null" in reason) is (content is None)


def test_a_line_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"tokens": ' + "[" * 100_000 + "\n" + '{"prompt": "a"}\n')
    deep, plain = read(path)
    assert deep.problem == "nested too deeply"
    assert plain.content == {"prompt": "a"}


def test_a_model_that_is_not_there_asks_nobody(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match=r"there is no directory .*/typo: name one in Hugging Face layout"):
        Encoder(tmp_path / "typo")
