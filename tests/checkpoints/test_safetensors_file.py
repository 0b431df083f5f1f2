"""Headers of .safetensors files: good ones, and every way they can lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from halfbyte.checkpoints.safetensors_file import read_header
from halfbyte.errors import CheckpointError


def written(folder: Path, header: Any, body: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + body)
    return path


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    as_list = [list(part) if isinstance(part, tuple) else part for part in (shape, offsets)]
    return {"dtype": dtype, "shape": as_list[0], "data_offsets": as_list[1]}


def test_every_dtype_reads_back(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    values = torch.randint(0, 100, (3, 5), generator=random)
    dtypes = [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
    ]
    dtypes += [torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn]
    wanted = {str(dtype): values.to(dtype) for dtype in dtypes} | {
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3.0),
    }
    save_file(wanted, tmp_path / "model.safetensors")
    found = read_header(tmp_path / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        read = found[name].read()
        assert read.dtype == value.dtype
        assert read.shape == value.shape
        assert torch.equal(read.float(), value.float())


def test_a_tensor_at_an_odd_offset(tmp_path: Path) -> None:
    body = b"\x07" + np.array([1.5, -2.5], "<f4").tobytes()
    path = written(tmp_path, {"a": entry("U8", (1,), (0, 1)), "b": entry("F32", (2,), (1, 9))}, body)
    assert read_header(path)["b"].read().tolist() == [1.5, -2.5]


def test_writing_to_a_tensor_does_not_change_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, {"a": entry()}, bytes(8))
    read_header(path)["a"].read().fill_(1)
    assert read_header(path)["a"].read().tolist() == [0, 0]


@pytest.mark.parametrize(
    "bad",
    [
        entry(dtype="F4"),
        entry(dtype=None),
        entry(dtype=[1]),
        entry(shape=(-2,)),
        entry(shape="2"),
        entry(shape=(2.0,)),
        entry(shape=(True, 2)),
        entry(shape=(2**62, 2**62)),
        entry(shape=(10**30,)),
        entry(shape=(1,) * 9),
        entry(offsets=(8, 0)),
        entry(offsets=(0,)),
        entry(offsets=(0, 4)),
        entry(offsets=(0, "8")),
        entry(offsets=None),
        entry(offsets=(-8, 0)),
        [],
        4,
        {},
    ],
)
def test_an_impossible_entry_is_refused_by_name(tmp_path: Path, bad: Any) -> None:
    path = written(tmp_path, {"some.weight": bad}, bytes(8))
    with pytest.raises(CheckpointError) as error:
        read_header(path)
    assert "model.safetensors" in str(error.value)
    assert "some.weight" in str(error.value)


def test_a_file_that_is_cut_off_names_the_tensor(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors, tensor a: the file ends before"):
        read_header(written(tmp_path, {"a": entry()}, bytes(7)))


def test_tensors_over_each_other(tmp_path: Path) -> None:
    path = written(tmp_path, {"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12))
    with pytest.raises(CheckpointError, match="over each other"):
        read_header(path)


@pytest.mark.parametrize(
    ("header", "length"),
    [
        (b"", 2**63),
        (b"{}", 3),
        (b"{}", 101 * 2**20),
        (b"{", None),
        (b"[]", None),
        (b"\xff\xfe", None),
        (b'{"a": 1, "a": 2}', None),
        (b"[" * 200000, None),
        (b'{"a":' * 200000, None),
        (b'{"a": ' + b"9" * 5000 + b"}", None),
    ],
)
def test_a_damaged_header(tmp_path: Path, header: bytes, length: int | None) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_header(written(tmp_path, header, length=length))


@pytest.mark.parametrize("size", [0, 1, 7])
def test_a_file_shorter_than_a_length(tmp_path: Path, size: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(size))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_header(tmp_path / "model.safetensors")


def test_an_absurd_header_length_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:  # a sparse file of 8 GB
        file.write((6 * 10**9).to_bytes(8, "little"))
        file.truncate(8 * 10**9)
    with pytest.raises(CheckpointError, match="header"):
        read_header(path)


@pytest.mark.parametrize("padding", [0, 1])  # at an odd offset a large tensor is copied to a good one
def test_a_large_tensor_and_single_rows_of_it(tmp_path: Path, padding: int) -> None:
    values = np.arange(2**19, dtype="<i4").reshape(512, 1024)
    body = bytes(padding) + values.tobytes()
    header = {
        "a": entry("U8", (padding,), (0, padding)),
        "b": entry("I32", (512, 1024), (padding, len(body))),
    }
    stored = read_header(written(tmp_path, header, body))["b"]
    assert np.array_equal(stored.read().numpy(), values)
    assert np.array_equal(stored.rows(0, 511, 7).numpy(), values[[0, 511, 7]])


def test_a_file_that_has_become_shorter(tmp_path: Path) -> None:
    path = written(tmp_path, {"a": entry("F32", (2,), (0, 8))}, bytes(8))
    stored = read_header(path)["a"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*shorter"):
        stored.read()
