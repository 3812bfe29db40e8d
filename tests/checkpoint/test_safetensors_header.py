"""The container validator: every way a header can lie, and random damage."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from dspine_export.checkpoint.safetensors_header import read_header
from dspine_export.checkpoint.safetensors_store import TensorStore
from dspine_export.errors import CheckpointError

Writer = Callable[..., Path]


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


BAD_HEADERS = {
    "overlap": ({"a": entry(), "b": entry(offsets=(4, 12))}, 12, "overlaps"),
    "same_bytes_twice": ({"a": entry(), "b": entry()}, 8, "overlaps"),
    "hole": ({"a": entry(), "b": entry(offsets=(12, 20))}, 20, "hole"),
    "hole_at_start": ({"a": entry(offsets=(4, 12))}, 12, "hole"),
    "truncated_data": ({"a": entry()}, 7, "past the end"),
    "trailing_bytes": ({"a": entry()}, 9, "after the last"),
    "shape_too_big": ({"a": entry(shape=(3,))}, 8, "does not match"),
    "shape_overflow": ({"a": entry(shape=[2**61, 2**61, 8])}, 8, "does not match"),
    "negative_dim": ({"a": entry(shape=[-2])}, 8, "shape"),
    "bool_dim": ({"a": entry(shape=[True, 2])}, 8, "shape"),
    "float_dim": ({"a": entry(shape=[2.0])}, 8, "shape"),
    "shape_not_list": ({"a": entry(shape=2)}, 8, "shape"),
    "too_many_dims": ({"a": entry(shape=[1] * 30)}, 8, "shape"),
    "unknown_dtype": ({"a": entry(dtype="F33")}, 8, "dtype"),
    "dtype_not_string": ({"a": entry(dtype=["F32"])}, 8, "dtype"),
    "offsets_reversed": ({"a": entry(offsets=(8, 0))}, 8, "data_offsets"),
    "offsets_negative": ({"a": entry(offsets=(-8, 0))}, 8, "data_offsets"),
    "offsets_huge": ({"a": entry(offsets=(0, 10**30))}, 8, "data_offsets"),
    "offsets_three": ({"a": entry(offsets=(0, 4, 8))}, 8, "data_offsets"),
    "missing_key": ({"a": {"dtype": "F32", "shape": [2]}}, 8, "entry"),
    "extra_key": ({"a": {**entry(), "strides": [1]}}, 8, "entry"),
    "entry_not_object": ({"a": [1, 2]}, 8, "entry"),
    "bad_metadata": ({"__metadata__": {"k": 1}, "a": entry()}, 8, "metadata"),
    "empty_name": ({"": entry()}, 8, "name"),
    "unprintable_name": ({"a\u001b[2J": entry()}, 8, "name"),
    "surrogate_name": ({"\ud800": entry()}, 8, "name"),
    "duplicate_name": (b'{"a":%b,"a":%b}' % (2 * (json.dumps(entry()).encode(),)), 8, "JSON"),
    "not_json": (b"{hello", 0, "JSON"),
    "not_utf8": (b'{"\xff":1}', 0, "JSON"),
    "not_object": (b"[1,2,3]", 0, "header"),
    "nan": (b'{"a":NaN}', 0, "JSON"),
    "deep": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 0, "nested"),
    "long_integer": (b'{"a":' + b"9" * 10_000 + b"}", 0, "JSON"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_bad_headers_are_refused(case: str, raw_file: Writer) -> None:
    header, data_size, message = BAD_HEADERS[case]
    path = raw_file(header, bytes(data_size))
    with pytest.raises(CheckpointError, match=message) as error:
        read_header(path)
    assert str(path) in str(error.value)
    str(error.value).encode()  # printable on any terminal


@pytest.mark.parametrize("length", [0, 1, 10**6, 100_000_001, 2**63, 2**64 - 1])
def test_header_length_lies(length: int, raw_file: Writer) -> None:
    with pytest.raises(CheckpointError, match="header length"):
        read_header(raw_file({"a": entry()}, bytes(8), length=length))


@pytest.mark.parametrize("size", [0, 1, 7])
def test_files_shorter_than_the_length_field(size: int, tmp_path: Path) -> None:
    path = tmp_path / "short.safetensors"
    path.write_bytes(bytes(size))
    with pytest.raises(CheckpointError, match="Truncated"):
        read_header(path)


def test_missing_file_and_special_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not found"):
        read_header(tmp_path / "absent.safetensors")
    with pytest.raises(CheckpointError, match="Not a regular file"):
        read_header(Path("/dev/zero"))
    with pytest.raises(CheckpointError, match="Not a regular file"):
        read_header(tmp_path)


def test_every_truncation_of_a_real_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}, path)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            read_header(path)


def test_reads_what_safetensors_writes(tmp_path: Path) -> None:
    tensors = {
        "matrix": torch.randn(3, 5),
        "half": torch.randn(4).half(),
        "brain": torch.randn(2, 2).bfloat16(),
        "ids": torch.arange(7),
        "flag": torch.tensor(True),
        "empty": torch.zeros(0, 4),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    before = path.read_bytes()
    store = TensorStore.from_files([path])
    assert set(store) == set(tensors)
    for name, value in tensors.items():
        read = store.read(name)
        assert read.dtype == value.dtype
        assert torch.equal(read, value)
    info = store["matrix"]
    assert before[info.offset_bytes : info.offset_bytes + info.size_bytes] == tensors["matrix"].numpy().tobytes()
    assert b"".join(store.read_bytes("matrix", chunk_bytes=7)) == tensors["matrix"].numpy().tobytes()
    store.read("matrix").zero_()
    assert path.read_bytes() == before, "writes must stay in this process"


def test_unaligned_tensors_are_copied_not_refused(raw_file: Writer) -> None:
    values = struct.pack("<?2f", True, 1.5, -2.5)[0:1] + struct.pack("<2f", 1.5, -2.5)
    header = {"flag": entry("BOOL", [], (0, 1)), "x": entry("F32", [2], (1, 9))}
    store = TensorStore.from_files([raw_file(header, values)])
    assert store.read("x").tolist() == [1.5, -2.5]


def test_same_name_in_two_files(raw_file: Writer) -> None:
    paths = [raw_file({"a": entry()}, bytes(8), name=f"{i}.safetensors") for i in range(2)]
    with pytest.raises(CheckpointError, match="twice"):
        TensorStore.from_files(paths)


def _valid_file() -> bytes:
    header = {
        "__metadata__": {"format": "pt"},
        "a.weight": entry("F32", [2, 3], (0, 24)),
        "b.weight": entry("BF16", [4], (24, 32)),
        "ready": entry("BOOL", [], (32, 33)),
    }
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(range(33))


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flips=st.lists(st.tuples(st.integers(0, len(_valid_file()) - 34), st.integers(0, 255)), min_size=1, max_size=6))
def test_damaged_headers_never_raise_anything_else(flips: list[tuple[int, int]], tmp_path: Path) -> None:
    data = bytearray(_valid_file())
    for position, value in flips:
        data[position] = value
    path = tmp_path / "fuzzed.safetensors"
    path.write_bytes(data)
    try:
        store = TensorStore.from_files([path])
    except CheckpointError as error:
        str(error).encode()
        return
    for name, info in store.items():  # whatever was accepted must also be readable
        assert info.offset_bytes + info.size_bytes <= len(data)
        try:
            assert store.read(name).numel() >= 0
        except CheckpointError:
            assert info.dtype.startswith(("F4", "F6", "F8"))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(blob=st.binary(max_size=300))
def test_arbitrary_bytes_never_raise_anything_else(blob: bytes, tmp_path: Path) -> None:
    path = tmp_path / "noise.safetensors"
    path.write_bytes(struct.pack("<Q", max(0, len(blob) - 8)) + b"{" + blob)
    with pytest.raises(CheckpointError):
        read_header(path)
