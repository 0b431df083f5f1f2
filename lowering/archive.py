"""Writes IREE parameter archives (.irpa, format 0.0) piece by piece, so that memory holds two at most.

A piece is made while a thread hashes and writes the one before.
IREE's own builder takes all buffers at once. The layout is that of iree/schemas/parameter_archive.h: a header,
a table of entries, the names, and the storage, each tensor aligned to 64 bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from halfbyte.errors import CompilerError
from halfbyte.lowering.layout import up
from halfbyte.lowering.parameters import Parameters, TensorSpec

_HEADER = struct.Struct("<4sHHQQQ Q QQ QQ QQ")
_ENTRY = struct.Struct("<QIQ QQ QQ Q QQ")
_ENTRY_STRIDE = up(_ENTRY.size, 16)
_DATA, _ALIGNMENT = 2, 64

Progress = Callable[[int, int], None]


class _Hashed:
    """A file that hashes what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.hash, self.position = file, hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> None:
        self.file.write(data)
        self.hash.update(data)
        self.position += len(data)

    def pad_to(self, position: int) -> None:
        self.write(bytes(position - self.position))


def write_archive(path: Path, parameters: Parameters, progress: Progress = lambda done, total: None) -> str:
    """Writes every tensor of ``parameters`` and returns the file's SHA-256.

    Args:
        progress: called after every piece with the bytes made so far and the bytes of all tensors.

    Raises:
        CompilerError: a tensor has another size than was declared, or two have the same key.
    """
    tensors = parameters.tensors
    _check(tensors)
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(up(end, _ALIGNMENT))
        end = offsets[-1] + tensor.bytes
    with path.open("wb") as raw, _one_thread(), ThreadPoolExecutor(1, "halfbyte-archive") as beside:
        file = _Hashed(raw)
        storage = _write_tables(file, tensors, offsets, end)
        done, total = 0, sum(tensor.bytes for tensor in tensors)
        place = iter(offsets)
        written: Future[None] | None = None
        for group in parameters.groups.values():
            made = group.make()
            for tensor in group.tensors:
                start = at = storage + next(place)
                values = made[tensor.key]
                for piece in [values] if isinstance(values, np.ndarray) else values:
                    data = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
                    if written is not None:  # one piece at most waits, so that memory holds no third
                        written.result()
                    written = beside.submit(_write, file, at, data)
                    at += data.nbytes
                    done += data.nbytes
                    progress(done, total)
                _check_size(tensor, at - start)
        if written is not None:
            written.result()
        return file.hash.hexdigest()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Torch's threads meet after every small step, in loops that are slow where anything else has a core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check_size(tensor: TensorSpec, size: int) -> None:
    if size != tensor.bytes:
        raise CompilerError(
            "a tensor has another size than declared",
            where=tensor.key,
            found=f"{size} bytes",
            accepted=f"{tensor.bytes} bytes for {tensor.type}",
        )


def _write(file: _Hashed, position: int, data: np.ndarray) -> None:
    file.pad_to(position)
    file.write(data.data)


def _check(tensors: list[TensorSpec]) -> None:
    seen: set[str] = set()
    for tensor in tensors:
        if not tensor.key or tensor.key in seen:
            raise CompilerError("every tensor of an archive needs a name of its own", where=repr(tensor.key))
        seen.add(tensor.key)


def _write_tables(file: _Hashed, tensors: list[TensorSpec], offsets: list[int], end: int) -> int:
    """Header, entries and names; returns where the storage starts."""
    names = [tensor.key.encode() for tensor in tensors]
    entries = up(_HEADER.size, 16)
    entries_size = _ENTRY_STRIDE * (len(tensors) - 1) + _ENTRY.size if tensors else 0
    names_at, names_size = entries + entries_size, sum(map(len, names))
    storage = up(names_at + names_size, _ALIGNMENT)
    segments = (entries, entries_size, names_at, names_size, storage, end)
    file.write(_HEADER.pack(b"IRPA", 0, 0, _HEADER.size, 0, 0, len(tensors), *segments))
    name_at = 0
    for index, (tensor, name, offset) in enumerate(zip(tensors, names, offsets, strict=True)):
        file.pad_to(entries + index * _ENTRY_STRIDE)
        file.write(
            _ENTRY.pack(_ENTRY.size, _DATA, 0, name_at, len(name), 0, 0, _ALIGNMENT, offset, tensor.bytes)
        )
        name_at += len(name)
    file.pad_to(names_at)
    file.write(b"".join(names))
    file.pad_to(storage)
    return storage
