"""The codec of weight deltas, on every dtype and any bits: what comes out is what went in, or an error."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.trainers.errors import CorruptCheckpoint
from millrace.trainers.weights import delta
from millrace.trainers.weights.tensorfile import SIZES, Tensor, TensorFile, open_file, slots

Named = dict[str, tuple[str, tuple[int, ...], bytes]]


def to_file(named: Named) -> TensorFile:
    """A safetensors file of these tensors."""
    about: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, data) in named.items():
        about[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(about).encode()
    tensors = {n: Tensor(d, s, np.frombuffer(data, np.uint8)) for n, (d, s, data) in named.items()}
    return TensorFile(struct.pack("<Q", len(text)) + text, tensors)


def plain(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    return {name: tensor.data.tobytes() for name, tensor in tensors.items()}


def composed(base: Mapping[str, Tensor], *chain: bytes) -> dict[str, bytes]:
    return {n: data.tobytes() for n, data in delta.compose(base, [delta.decode(each) for each in chain])}


@st.composite
def histories(draw: st.DrawFn) -> list[TensorFile]:
    """Versions in which anything may change: a few elements, all, none, a dtype, a shape, which tensors there are."""
    seed = np.random.default_rng(draw(st.integers(0, 2**32)))
    now: Named = {}
    out = []
    for _ in range(draw(st.integers(2, 5))):
        for name in draw(st.sets(st.sampled_from("abcd"), min_size=1)):
            how = draw(st.sampled_from(["new", "some", "all", "gone"]))
            if how == "gone":
                now.pop(name, None)
            elif how == "new" or name not in now:
                dtype = draw(st.sampled_from(sorted(SIZES)))
                shape = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
                size = int(np.prod(shape, dtype=int)) * SIZES[dtype]
                now[name] = dtype, shape, seed.bytes(size)
            else:
                dtype, shape, data = now[name]
                fresh = np.frombuffer(data, f"<u{SIZES[dtype]}").copy()
                share = 1.0 if how == "all" else draw(st.sampled_from([0.0, 0.001, 0.1, 0.5]))
                fresh[seed.random(fresh.size) < share] ^= fresh.dtype.type(1)
                now[name] = dtype, shape, fresh.tobytes()
        out.append(to_file(dict(now)))
    return out


@settings(max_examples=60, deadline=None)
@given(histories())
def test_what_was_encoded_comes_out_bit_for_bit(history: list[TensorFile]) -> None:
    links = [delta.encode(old.tensors, new) for old, new in pairwise(history)]
    for old, link, new in zip(history, links, history[1:], strict=False):
        assert delta.decode(link).header == new.header
        assert composed(old.tensors, link) == plain(new.tensors)
        assert list(composed(old.tensors, link)) == list(new.tensors)
        assert composed(new.tensors, link) == plain(new.tensors), "applied again"
        assert composed(old.tensors, link, link) == plain(new.tensors), "applied twice"
        assert delta.encode(old.tensors, new) == link, "equal inputs, equal bytes"
    last = plain(history[-1].tensors)
    for at in range(len(links)):
        assert composed(history[at].tensors, *links[at:]) == last, "a late reader skips versions"
        assert composed(history[at].tensors, *links) == last, "a chain from a later version than it begins at"


def files(changed: float, size: int = 4096) -> tuple[TensorFile, TensorFile]:
    seed = np.random.default_rng(0)
    old = seed.integers(0, 2**16, size, np.uint16)
    new = old.copy()
    new[seed.random(size) < changed] ^= 1
    return tuple(to_file({"w": ("BF16", (size,), each.tobytes())}) for each in (old, new))  # type: ignore[return-value]


@pytest.mark.parametrize(("changed", "form"), [(0.0, "same"), (0.01, "sparse"), (0.4, "sparse"), (1.0, "dense")])
def test_the_smallest_form_is_taken(changed: float, form: str) -> None:
    old, new = files(changed)
    made = delta.decode(delta.encode(old.tensors, new))
    assert made.entries["w"].form == form
    assert made.changed == (4096 if form == "dense" else int((old.tensors["w"].data != new.tensors["w"].data).sum()))


def test_few_changes_take_few_bytes() -> None:
    old, new = files(0.01, 1 << 16)
    assert len(delta.encode(old.tensors, new)) < (1 << 17) // 30
    assert len(delta.encode(old.tensors, old)) < 300


def test_bits_are_compared_and_not_numbers() -> None:
    old = to_file({"w": ("F32", (3,), np.array([0.0, np.nan, 1.0], "<f4").tobytes())})
    new = to_file({"w": ("F32", (3,), np.array([-0.0, np.nan, 1.0], "<f4").tobytes())})
    assert delta.decode(delta.encode(old.tensors, new)).changed >= 1
    assert composed(old.tensors, delta.encode(old.tensors, new)) == plain(new.tensors)
    assert delta.decode(delta.encode(old.tensors, old)).changed == 0


def test_gaps_of_more_than_16_bits() -> None:
    data = np.zeros(200_000, np.uint8)
    old = to_file({"w": ("U8", (200_000,), data.tobytes())})
    data[[0, 150_000, 199_999]] = 7
    new = to_file({"w": ("U8", (200_000,), data.tobytes())})
    made = delta.encode(old.tensors, new)
    assert delta.decode(made).entries["w"].width == 4
    assert composed(old.tensors, made) == plain(new.tensors)


def test_another_base_is_refused() -> None:
    old, new = files(0.01)
    other = to_file({"w": ("BF16", (4096,), bytes(8192))})
    with pytest.raises(CorruptCheckpoint, match="another version"):
        composed(other.tensors, delta.encode(old.tensors, new))
    with pytest.raises(CorruptCheckpoint, match="not in the version"):
        composed({}, delta.encode(old.tensors, new))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_damage_is_refused(data: st.DataObject) -> None:
    old, new = files(0.05, 512)
    made = bytearray(delta.encode(old.tensors, new))
    if data.draw(st.booleans()):
        bit = data.draw(st.integers(0, len(made) * 8 - 1))
        made[bit // 8] ^= 1 << bit % 8
    else:
        del made[data.draw(st.integers(0, len(made) - 1)) :]
    with pytest.raises(CorruptCheckpoint):
        delta.decode(bytes(made))


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        '{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}',
        '{"a":{"dtype":"F32","data_offsets":[0,4]}}',
    ],
)
def test_an_impossible_header_is_refused(text: str) -> None:
    for header in (struct.pack("<Q", len(text)) + text.encode(), struct.pack("<Q", 3) + text.encode(), b""):
        with pytest.raises(CorruptCheckpoint):
            slots(header)


@pytest.mark.parametrize("cut", [0, 4, 20, -1])
def test_a_file_that_is_not_whole_is_refused(tmp_path: Path, cut: int) -> None:
    new = files(0.0)[1]
    data = new.header + new.tensors["w"].data.tobytes()
    (tmp_path / "whole").write_bytes(data)
    assert plain(open_file(tmp_path / "whole").tensors) == plain(new.tensors)
    (tmp_path / "cut").write_bytes(data[:cut])
    with pytest.raises(CorruptCheckpoint, match="no whole safetensors"):
        open_file(tmp_path / "cut")
