"""Whatever the bytes of a sealed file are, reading it raises CorruptCheckpoint and nothing else, within a bound."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import cramjam
import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.consumers.reloader import directory
from millrace.infra.errors import ReloadError
from millrace.schemas import bounds
from millrace.trainers.errors import CorruptCheckpoint
from millrace.trainers.weights import delta, manifest, tensorfile
from millrace.trainers.weights.tensorfile import Tensor, TensorFile

HEADER = {"a": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}}
BASE = {"a": Tensor("F32", (64,), np.arange(256, dtype=np.uint8))}
ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def header(about: object = HEADER) -> bytes:
    text = json.dumps(about).encode()
    return len(text).to_bytes(8, "little") + text


def sealed(table: object, body: bytes = b"") -> bytes:
    """A delta whose checksum is right, whatever its table says."""
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    packed = bytes(cramjam.zstd.compress(text))
    rest = len(packed).to_bytes(8, "little") + packed + body
    return delta.MAGIC + xxhash.xxh3_128_digest(rest) + rest


def table(**entry: Any) -> dict[str, Any]:
    about = {"form": "same", "width": 0, "count": 0, "blocks": [], "checksum": "0", **entry}
    return {"header": header().decode("latin-1"), "tensors": {"a": list(about.values())}}


def read(data: bytes) -> None:
    for _ in delta.compose(BASE, [delta.decode(data)]):
        pass


@pytest.mark.parametrize(
    "data",
    [
        sealed([]),
        sealed({"header": 3, "tensors": {}}),
        sealed(table(form="dense", count=2**40, blocks=[[0, 4]]), b"abcd"),
        sealed(table(form="sparse", width=3, count=1, blocks=[[0, 2], [2, 4]]), b"abcd"),
        sealed(table(form="sparse", width=1, count=1, blocks=[[0, 2], [2, 4]]), b"abcd"),
        sealed(table(form="dense", count=64, blocks=[])),
        sealed(b"[" * 100_000),
        sealed(b" " * (2**30)),
        delta.MAGIC + xxhash.xxh3_128_digest(b"\xff" * 40) + b"\xff" * 40,
    ],
    ids=["list", "header", "terabyte", "width", "zstd", "blocks", "deep", "bomb", "length"],
)
def test_a_hostile_delta_is_corrupt_and_takes_no_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpoint):
            read(data)
        assert tracemalloc.get_traced_memory()[1] < 8 * bounds.TABLE_BYTES
    finally:
        tracemalloc.stop()


@given(ODD)
def test_any_table_is_a_delta_or_corrupt(about: object) -> None:
    for data in (sealed(about), sealed({"header": header().decode("latin-1"), "tensors": about})):
        with pytest.raises(CorruptCheckpoint):
            read(data)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(("form", "width", "count", "blocks", "checksum"), ODD)))
def test_any_entry_is_read_or_corrupt(entry: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpoint):
        read(sealed(table(**entry), b"some bytes"))


@given(st.data())
def test_any_byte_of_a_delta_that_changes_is_found(data: st.DataObject) -> None:
    target = {"a": Tensor("F32", (64,), np.arange(256, dtype=np.uint8)[::-1].copy())}
    whole = bytearray(delta.encode(BASE, TensorFile(header(), target)))
    start = data.draw(st.sampled_from([0, 24]))  # with its checksum, or under a new one
    places = st.lists(st.integers(start, len(whole) - 1), min_size=1, max_size=4, unique=True)
    for place in data.draw(places):
        whole[place] ^= data.draw(st.integers(1, 255))
    if start:
        whole[8:24] = xxhash.xxh3_128_digest(bytes(whole[24:]))
    try:
        read(bytes(whole))
    except CorruptCheckpoint:
        return
    assert start, "a change under the old checksum went unseen"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(about=ODD, raw=st.binary(max_size=64))
def test_any_directory_is_read_or_corrupt(tmp_path: Path, about: object, raw: bytes) -> None:
    for content in (header({"a": about}), header(about), raw):
        (tmp_path / "model.safetensors").write_bytes(content)
        for load in (tensorfile.open_folder, lambda folder: directory.signature(folder, ["model.safetensors"])):
            try:
                load(tmp_path)
            except (CorruptCheckpoint, ReloadError):
                continue
    for content in (json.dumps(about).encode(), json.dumps({"files": about}).encode(), raw):
        (tmp_path / manifest.NAME).write_bytes(content)
        try:
            manifest.verify(tmp_path)
        except CorruptCheckpoint:
            continue
    for content in (json.dumps(about).encode(), json.dumps({"weight_map": about}).encode(), raw):
        (tmp_path / tensorfile.INDEX).write_bytes(content)
        try:
            tensorfile.open_folder(tmp_path)
        except CorruptCheckpoint:
            continue
    (tmp_path / tensorfile.INDEX).unlink()


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "", "a/b.safetensors"])
def test_an_index_names_files_beside_it(tmp_path: Path, name: str) -> None:
    (tmp_path / tensorfile.INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CorruptCheckpoint, match="no file beside it"):
        tensorfile.weight_files(tmp_path)
