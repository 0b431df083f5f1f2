"""The header of a GGUF file: metadata and where each tensor lies.

The layout is that of ggml's GGUF specification, versions 2 and 3. It is walked here, with every length
checked against the file, and not by the gguf package's reader: that one follows lengths past the end of a
damaged file for practically ever. Types and block sizes come from the package.
"""

from __future__ import annotations

import itertools
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from halfbyte.errors import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = "BbHhIif?"  # struct codes of value types 0 to 7
_STRING, _ARRAY = 8, 9
_WIDE = {10: "Q", 11: "q", 12: "d"}
_KEPT = 4096  # longer arrays (tokens, merges) are walked and not kept
_MAX_DIMENSIONS, _MAX_KEYS, _MAX_TENSORS, _MAX_NAME = 4, 10**5, 10**6, 10**3


@dataclass(frozen=True)
class LongArray:
    """An array of the metadata of which only the length is kept."""

    length: int


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies.

    Attributes:
        path: the file.
        name: as in the file.
        type: ggml's name of the type in lower case, e.g. ``q4_0``, ``f16``.
        number: ggml's number of the type.
        shape: the slowest dimension first, as in torch: (N, K).
        start: offset of its first byte in the file.
        row_bytes: bytes of one row along the last dimension.
    """

    path: Path
    name: str
    type: str
    number: int
    shape: tuple[int, ...]
    start: int
    row_bytes: int

    def read(self) -> torch.Tensor:
        """uint8 [rows, row_bytes], backed by a private map of just its part of the file."""
        rows = math.prod(self.shape[:-1])
        page = self.start - self.start % mmap.ALLOCATIONGRANULARITY
        offset, size = self.start - page, rows * self.row_bytes
        try:
            with self.path.open("rb") as file:
                buffer = mmap.mmap(file.fileno(), offset + size, access=mmap.ACCESS_COPY, offset=page)
        except (OSError, ValueError) as error:
            raise CheckpointError("cannot be read", where=self.path.name, found=str(error)) from None
        return torch.frombuffer(buffer, dtype=torch.uint8, count=size, offset=offset).reshape(
            rows, self.row_bytes
        )


@dataclass(frozen=True)
class GgufHeader:
    """Metadata by key (long arrays as `LongArray`), and tensors by their name in the file."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """Reads and checks the header of a GGUF file.

    Raises:
        CheckpointError: naming the file, when it is no GGUF file of version 2 or 3, its header is damaged, or
            a tensor lies outside the file or over another one.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            if size < 24:
                raise CheckpointError("is too short for a GGUF file", where=path.name, found=f"{size} bytes")
            with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as blob:
                return _header(path, _Cursor(blob, path.name))
    except OSError as error:
        raise CheckpointError("cannot be read", where=path.name, found=error.strerror or str(error)) from None


class _Cursor:
    """Reads values one after the other and never past the end."""

    def __init__(self, blob: mmap.mmap, where: str) -> None:
        self.blob, self.where, self.at = blob, where, 0

    def skip(self, size: int) -> int:
        """Moves on by `size` bytes; where they begin."""
        start = self.at
        if size > len(self.blob) - start:
            raise CheckpointError(
                "the file ends inside its header",
                where=self.where,
                found=f"{len(self.blob)} bytes",
                advice="the file is cut off or damaged: fetch it again",
            )
        self.at = start + size
        return start

    def number(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        return struct.unpack_from("<" + code, self.blob, self.skip(size))[0]

    def text(self, largest: int | None = None) -> str:
        length = self.number("Q")
        if largest is not None and length > largest:
            raise CheckpointError(
                "a name in the header is impossibly long", where=self.where, found=f"{length} bytes"
            )
        start = self.skip(length)
        try:
            return self.blob[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(
                "a text in the header is not UTF-8", where=self.where, found=str(error)
            ) from None

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self.array()
        return self.number(self.code(kind))

    def code(self, kind: int) -> str:
        code = _SCALARS[kind] if kind < len(_SCALARS) else _WIDE.get(kind)
        if code is None:
            raise CheckpointError(
                "the metadata has a value of an unknown type", where=self.where, found=str(kind)
            )
        return code

    def array(self) -> Any:
        kind, length = self.number("I"), self.number("Q")
        if kind == _ARRAY:
            raise CheckpointError("the metadata has an array of arrays", where=self.where)
        if kind != _STRING:
            code = self.code(kind)
            start = self.skip(length * struct.calcsize("<" + code))
            if length > _KEPT:
                return LongArray(length)
            return list(struct.unpack_from(f"<{length}{code}", self.blob, start))
        if length <= _KEPT:
            return [self.text() for _ in range(length)]
        for _ in range(length):
            self.skip(self.number("Q"))
        return LongArray(length)


def _header(path: Path, cursor: _Cursor) -> GgufHeader:
    magic = cursor.blob[cursor.skip(4) : 4]
    version = cursor.number("I")
    if magic != _MAGIC or version not in _VERSIONS:
        raise CheckpointError(
            "is no GGUF file of a known version (or one for big-endian machines)",
            where=path.name,
            found=f"{magic!r}, version {version}",
            accepted=f"{_MAGIC!r}, version 2 or 3, little-endian",
        )
    tensor_count, key_count = cursor.number("Q"), cursor.number("Q")
    if tensor_count > _MAX_TENSORS or key_count > _MAX_KEYS:
        raise CheckpointError(
            "the header promises an impossible number of entries",
            where=path.name,
            found=f"{tensor_count} tensors, {key_count} keys",
        )
    metadata = {}
    for _ in range(key_count):
        key = cursor.text(_MAX_NAME)
        metadata[key] = cursor.value(cursor.number("I"))
    entries = [_entry(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 2**20:
        raise CheckpointError("general.alignment is impossible", where=path.name, found=repr(alignment)[:100])
    base = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, number, offset in entries:
        if name in tensors:
            raise CheckpointError("the file holds a tensor twice", where=path.name, found=name)
        tensors[name] = _placed(path, name, shape, number, base + offset, len(cursor.blob))
    _check_overlaps(path.name, tensors)
    return GgufHeader(metadata, tensors)


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text(_MAX_NAME)
    dimensions = cursor.number("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise CheckpointError(
            "has an impossible number of dimensions",
            where=f"{cursor.where}, tensor {name}",
            found=str(dimensions),
            accepted=f"1 to {_MAX_DIMENSIONS}",
        )
    fastest_first = [cursor.number("Q") for _ in range(dimensions)]
    return name, tuple(reversed(fastest_first)), cursor.number("I"), cursor.number("Q")


def _placed(
    path: Path, name: str, shape: tuple[int, ...], number: int, start: int, file_size: int
) -> GgufTensor:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    where = f"{path.name}, tensor {name}"
    try:
        kind = GGMLQuantizationType(number)
        block, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise CheckpointError(
            "has a type this version does not know", where=where, found=f"type {number}"
        ) from None
    if min(shape) < 1 or shape[-1] % block:
        raise CheckpointError(
            f"has an impossible shape for {kind.name}",
            where=where,
            found=str(list(shape)),
            accepted=f"rows of a multiple of {block} values",
        )
    row_bytes = shape[-1] // block * block_bytes
    end = start + math.prod(shape[:-1]) * row_bytes
    if end > file_size:
        raise CheckpointError(
            "the file ends before this tensor does",
            where=where,
            found=f"{file_size} bytes",
            accepted=f"at least {end} bytes",
            advice="the file is cut off or damaged: fetch it again",
        )
    return GgufTensor(path, name, kind.name.lower(), number, shape, start, row_bytes)


def _check_overlaps(where: str, tensors: dict[str, GgufTensor]) -> None:
    ordered = sorted(tensors.values(), key=lambda tensor: tensor.start)
    for first, second in itertools.pairwise(ordered):
        if first.start + math.prod(first.shape[:-1]) * first.row_bytes > second.start:
            raise CheckpointError(
                "two tensors lie over each other", where=where, found=f"{first.name} and {second.name}"
            )
