"""One .safetensors file: its header, fully checked, and its tensors, mapped one at a time.

The format is defined by the safetensors project: 8 bytes with the length of a JSON header, the header
(name -> dtype, shape, data_offsets), then the data. The header is parsed here and not by the safetensors
package because a file that is cut off or lies about itself has to be refused with the name of the tensor
concerned, before anything is allocated.
"""

from __future__ import annotations

import itertools
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from halfbyte.checkpoints.json_file import parse_json_object
from halfbyte.errors import CheckpointError

_MAX_HEADER = 100 * 2**20  # the limit of the safetensors package itself
_MAX_DIMENSIONS = 8
_METADATA = "__metadata__"
_COPIED = 2**20  # bytes; up to here reading costs less than mapping
_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies.

    Attributes:
        path: the file.
        dtype: as stored.
        shape: as stored.
        start: offset of its first byte in the file.
        size: bytes.
    """

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    size: int

    def read(self) -> torch.Tensor:
        """The tensor: a large one backed by a private map of just its part of the file, without a copy.

        Raises:
            CheckpointError: when the file cannot be read.
        """
        if self.size == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        if self.size <= _COPIED:
            return self._copied(self.start, self.size).reshape(self.shape)
        # A map must start at a multiple of the page size.
        page = self.start - self.start % mmap.ALLOCATIONGRANULARITY
        offset = self.start - page
        try:
            with self.path.open("rb") as file:
                buffer = mmap.mmap(file.fileno(), offset + self.size, access=mmap.ACCESS_COPY, offset=page)
        except (OSError, ValueError) as error:
            raise CheckpointError("cannot be read", where=self.path.name, found=str(error)) from None
        if self.start % self.dtype.itemsize:
            aligned = bytearray(buffer[offset:])
            return torch.frombuffer(aligned, dtype=self.dtype).reshape(self.shape)
        count = self.size // self.dtype.itemsize
        return torch.frombuffer(buffer, dtype=self.dtype, count=count, offset=offset).reshape(self.shape)

    def rows(self, *numbers: int) -> torch.Tensor:
        """These entries along the first dimension, read without touching the others.

        Raises:
            CheckpointError: when the file cannot be read.
        """
        size = self.size // self.shape[0]
        parts = [self._copied(self.start + number * size, size) for number in numbers]
        return torch.cat(parts).reshape(len(numbers), *self.shape[1:])

    def _copied(self, start: int, size: int) -> torch.Tensor:
        octets = bytearray(size)
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(start)
                got = file.readinto(octets)
        except OSError as error:
            raise CheckpointError("cannot be read", where=self.path.name, found=str(error)) from None
        if got != size:
            raise CheckpointError("has become shorter since it was opened", where=self.path.name)
        return torch.frombuffer(octets, dtype=self.dtype)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, by name, from its header alone.

    Raises:
        CheckpointError: naming the file, when the header is damaged, a tensor lies outside the file or over
            another one, or its bytes do not fit its shape.
    """
    header, base, file_size = _header(path)
    header.pop(_METADATA, None)
    stored = {name: _entry(path, name, entry, base, file_size) for name, entry in header.items()}
    _check_overlaps(path.name, stored)
    return stored


def read_metadata(path: Path) -> dict[str, str]:
    """What the header says beside the tensors; empty when nothing.

    Raises:
        CheckpointError: the header is damaged, or these are no texts by name.
    """
    found = _header(path)[0].get(_METADATA, {})
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise CheckpointError("has metadata that are no texts by name", where=path.name)
    return found


def _header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header, where the data begin, and the size of the file."""
    where = path.name
    try:
        file_size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if file_size < 8 or length > min(_MAX_HEADER, file_size - 8):
                raise CheckpointError(
                    "is not a safetensors file, or is cut off inside its header",
                    where=where,
                    found=f"{file_size} bytes with a header of {length} bytes",
                    accepted=f"a header that lies in the file and has at most {_MAX_HEADER} bytes",
                )
            return parse_json_object(file.read(length), f"{where} (header)"), 8 + length, file_size
    except OSError as error:
        raise CheckpointError("cannot be read", where=where, found=error.strerror or str(error)) from None


def _entry(path: Path, name: str, entry: Any, base: int, file_size: int) -> StoredTensor:
    where = f"{path.name}, tensor {name[:200]}"
    if not isinstance(entry, dict):
        raise CheckpointError(
            "has a header entry that is not an object", where=where, found=type(entry).__name__
        )
    tag: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    dtype = _DTYPES.get(tag) if isinstance(tag, str) else None
    if dtype is None:
        raise CheckpointError(
            "has an unknown dtype", where=where, found=repr(tag)[:100], accepted=", ".join(sorted(_DTYPES))
        )
    if not _is_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise CheckpointError(
            "has an impossible shape",
            where=where,
            found=repr(shape)[:200],
            accepted=f"at most {_MAX_DIMENSIONS} integers of at least 0",
        )
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(
            "has impossible data_offsets",
            where=where,
            found=repr(offsets)[:200],
            accepted="[start, end] with start <= end",
        )
    start, end = offsets
    size = math.prod(shape) * dtype.itemsize
    if end - start != size:
        raise CheckpointError(
            "has data of another size than its shape",
            where=where,
            found=f"{end - start} bytes for {tag} {shape}"[:300],
            accepted=f"{size} bytes"[:100],
        )
    if base + end > file_size:
        raise CheckpointError(
            "the file ends before this tensor does",
            where=where,
            found=f"{file_size} bytes",
            accepted=f"at least {base + end} bytes"[:100],
            advice="the file is cut off or damaged: fetch it again",
        )
    return StoredTensor(path, dtype, tuple(shape), base + start, size)


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(part) is int and 0 <= part < 2**63 for part in value)


def _check_overlaps(where: str, stored: dict[str, StoredTensor]) -> None:
    ordered = sorted(
        (tensor.start, tensor.start + tensor.size, name) for name, tensor in stored.items() if tensor.size
    )
    for (_, end, first), (start, _, second) in itertools.pairwise(ordered):
        if start < end:
            raise CheckpointError(
                "two tensors lie over each other", where=where, found=f"{first[:200]} and {second[:200]}"
            )
