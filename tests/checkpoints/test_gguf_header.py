"""Headers of GGUF files: good ones, and every way they can lie."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from halfbyte.checkpoints.gguf_header import LongArray, read_gguf_header
from halfbyte.errors import CheckpointError

U32, STRING, ARRAY, F32 = 4, 8, 9, 0


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, fastest_first: tuple[int, ...], kind: int = F32, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(fastest_first)}Q", len(fastest_first), *fastest_first)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


def written(
    folder: Path,
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    body: int = 0,
    start: bytes = struct.pack("<4sI", b"GGUF", 3),
    counts: tuple[int, int] | None = None,
) -> Path:
    head = start + struct.pack("<QQ", *(counts or (len(tensors), len(keys)))) + b"".join((*keys, *tensors))
    head += bytes(-len(head) % 32)
    path = folder / "model.gguf"
    path.write_bytes(head + bytes(body))
    return path


@pytest.mark.parametrize("name", ["llama-gguf-q4_0", "llama-gguf-q4_1"])
def test_agrees_with_the_gguf_package(data: Path, name: str) -> None:
    path = data / name / "model.gguf"
    header, reader = read_gguf_header(path), GGUFReader(path)
    assert header.tensors.keys() == {tensor.name for tensor in reader.tensors}
    for wanted in reader.tensors:
        found = header.tensors[wanted.name]
        assert found.type == wanted.tensor_type.name.lower()
        assert found.shape == tuple(int(size) for size in reversed(wanted.shape))
        assert found.start == wanted.data_offset
        assert found.read().numpy().tobytes() == wanted.data.tobytes()
    for field in reader.fields.values():
        if not field.name.startswith("GGUF."):
            assert header.metadata[field.name] == field.contents()


def test_values_of_every_type(tmp_path: Path) -> None:
    codes = "BbHhIif?Qqd"
    numbers = [0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12]
    keys = [
        key(f"k{number}", number, struct.pack("<" + code, 1))
        for number, code in zip(numbers, codes, strict=True)
    ]
    keys += [
        key("text", STRING, text("ü")),
        key("numbers", ARRAY, struct.pack("<IQ3H", 2, 3, 7, 8, 9)),
        key("texts", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + text("")),
        key("many", ARRAY, struct.pack("<IQ", 0, 5000) + bytes(5000)),
        key("many texts", ARRAY, struct.pack("<IQ", STRING, 5000) + text("x") * 5000),
    ]
    metadata = read_gguf_header(written(tmp_path, tuple(keys))).metadata
    assert [metadata[f"k{number}"] for number in numbers] == [1] * len(numbers)
    assert metadata["text"] == "ü"
    assert metadata["numbers"] == [7, 8, 9]
    assert metadata["texts"] == ["a", ""]
    assert metadata["many"] == metadata["many texts"] == LongArray(5000)


@pytest.mark.parametrize(
    "bad",
    [
        {"start": b"GGML" + struct.pack("<I", 3)},
        {"start": struct.pack("<4sI", b"GGUF", 1)},
        {"start": struct.pack(">4sI", b"GGUF", 3)},
        {"counts": (2**60, 0)},
        {"counts": (0, 2**60)},
        {"counts": (999999, 0)},
        {"counts": (0, 99999)},
        {"keys": (key("k", ARRAY, struct.pack("<IQ", U32, 2**62)),)},
        {"keys": (key("k", ARRAY, struct.pack("<IQ", STRING, 2**62)),)},
        {"keys": (key("k", ARRAY, struct.pack("<IQ", ARRAY, 1)),)},
        {"keys": (key("k", ARRAY, struct.pack("<IQ", 77, 1)),)},
        {"keys": (key("k", 77, b""),)},
        {"keys": (key("k", STRING, struct.pack("<Q", 2**63)),)},
        {"keys": (key("k", STRING, struct.pack("<Q", 2) + b"\xff\xff"),)},
        {"keys": (key("k" * 2000, U32, struct.pack("<I", 1)),)},
        {"keys": (key("general.alignment", U32, struct.pack("<I", 0)),)},
        {"keys": (key("general.alignment", STRING, text("32")),)},
        {"tensors": (tensor("a", ()),), "body": 64},
        {"tensors": (tensor("a", (1,) * 5),), "body": 64},
        {"tensors": (tensor("a", (0,)),), "body": 64},
        {"tensors": (tensor("a", (16,), 2),), "body": 64},
        {"tensors": (tensor("a", (4,), 999),), "body": 64},
        {"tensors": (tensor("a", (4,), 4),), "body": 64},
        {"tensors": (tensor("a", (2**63, 2**63)),), "body": 64},
        {"tensors": (tensor("a", (4,), F32, 2**63),), "body": 64},
        {"tensors": (tensor("a", (17,)),), "body": 64},
        {"tensors": (tensor("a", (8,)), tensor("b", (8,), F32, 16)), "body": 64},
        {"tensors": (tensor("a", (4,)), tensor("a", (4,), F32, 32)), "body": 64},
    ],
)
def test_damage_is_refused_by_file(tmp_path: Path, bad: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        read_gguf_header(written(tmp_path, **bad))


def test_a_file_cut_off_anywhere_is_refused(data: Path, tmp_path: Path) -> None:
    blob = (data / "llama-gguf-q4_0" / "model.gguf").read_bytes()
    path = tmp_path / "model.gguf"
    lengths = np.unique(np.r_[0:64, np.linspace(64, len(blob) - 1, 150).astype(int), len(blob) - 1])
    for length in lengths.tolist():
        path.write_bytes(blob[:length])
        with pytest.raises(CheckpointError, match=r"model\.gguf"):
            read_gguf_header(path)
