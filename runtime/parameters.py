"""Parameter archives in memory: checked against the manifest, and on huge pages where that is possible.

Which pages weights live on decides more about the speed of a single token than most kernels: with 4 KiB pages
of a mapped file the time goes into address translation. Anonymous memory on 2 MiB pages is 1.4 to 1.7 times
faster, and costs a copy of the archive in memory that cannot be shared between processes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import iree.runtime as rt

from halfbyte.errors import CheckpointError, UsageError
from halfbyte.runtime.huge_pages import HugePages, obstacle
from halfbyte.runtime.iree_messages import IREE_ERRORS, one_line
from halfbyte.runtime.manifest import ParameterArchive, ParameterTensor

MODES = ("huge", "mmap")
_PIECE = 32 << 20  # bytes per read


@dataclass(frozen=True)
class Residence:
    """Where an archive's bytes live.

    Attributes:
        file: name of the archive.
        mode: ``huge`` (anonymous memory advised to be huge pages) or ``mmap`` (the mapped file).
        bytes: size of the archive.
        huge_bytes: how many of them the kernel really backs with huge pages.
        reason: why it is not what was asked for, empty if it is.
    """

    file: str
    mode: str
    bytes: int
    huge_bytes: int
    reason: str = ""

    def __str__(self) -> str:
        mebibytes = self.bytes / (1 << 20)
        if self.mode == "huge":
            share = 100 * self.huge_bytes // max(self.bytes, 1)
            return f"{self.file}: {mebibytes:.1f} MiB in memory, {share} % on huge pages"
        return f"{self.file}: {mebibytes:.1f} MiB mapped" + (f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True)
class LoadedArchive:
    """An archive ready for a program.

    Attributes:
        index: IREE's index of its tensors; it keeps their memory alive.
        scope: what programs look it up by.
        residence: where its bytes live.
    """

    index: rt.ParameterIndex
    scope: str
    residence: Residence


def check_mode(mode: str) -> None:
    """Refuses a way of holding parameters that `load_archive` does not know.

    Raises:
        UsageError: it is neither ``huge`` nor ``mmap``.
    """
    if mode not in MODES:
        raise UsageError("unknown parameter mode", found=repr(mode), accepted=" or ".join(MODES))


def load_archive(
    folder: str | os.PathLike[str], archive: ParameterArchive, mode: str = "huge", *, checksum: bool = False
) -> LoadedArchive:
    """Opens an archive and checks its tensors.

    Args:
        folder: the bundle.
        archive: what the manifest says about it.
        mode: ``huge`` reads it into memory on huge pages, or maps it where there are none; ``mmap`` maps it.
        checksum: compare the file's SHA-256 too; takes about a second per GB.

    Raises:
        CheckpointError: the file is missing, truncated, no archive, or its tensors are not those of the
            manifest; names the tensor, the bytes wanted and the bytes there.
        UsageError: unknown mode.
    """
    check_mode(mode)
    path = Path(folder) / archive.file
    index, size = _map(path, archive.bytes)
    _check_tensors(path, index, archive.tensors)
    if size != archive.bytes:
        raise CheckpointError(
            "parameter archive of another size",
            where=str(path),
            found=f"{size} bytes",
            accepted=f"{archive.bytes} bytes",
            advice="copy the bundle again" if size < archive.bytes else "use the archive of this bundle",
        )
    if checksum:
        _check_sum(path, archive.sha256)
    reason = obstacle(size) if mode == "huge" else ""
    huge = 0
    if mode == "huge" and not reason:
        try:
            huge = _move(path, index)
        except MemoryError as error:
            reason = str(error)
            index, _ = _map(path, archive.bytes)
    mode = "mmap" if reason else mode
    return LoadedArchive(index, archive.scope, Residence(archive.file, mode, size, huge, reason))


def _map(path: Path, wanted: int) -> tuple[rt.ParameterIndex, int]:
    """IREE's index of the mapped file, and the file's size."""
    index = rt.ParameterIndex()
    size = 0
    try:
        size = path.stat().st_size
        index.load(str(path), format="irpa", mmap=True)
    except FileNotFoundError:
        raise CheckpointError("missing parameter archive", where=str(path)) from None
    except IREE_ERRORS as error:
        raise CheckpointError(
            "unreadable parameter archive",
            where=str(path),
            found=f"{size} of {wanted} bytes: {one_line(error)}",
            advice="copy the bundle again",
        ) from None
    return index, size


def _move(path: Path, index: rt.ParameterIndex) -> int:
    """Puts what is mapped onto huge pages, where it was mapped; returns how many bytes of it are on huge pages now."""
    entry = next((entry for _, entry in index.items() if entry.is_file), None)
    if entry is None:
        return 0
    handle, _ = entry.file_storage  # one for all
    pages = HugePages(handle.host_allocation)
    size = pages.array.size
    with path.open("rb", buffering=0) as file:
        done = 0
        while done < size:
            count = file.readinto(pages.array[done : min(done + _PIECE, size)].data)
            if not count:
                raise CheckpointError("parameter archive shrank while being read", where=str(path))
            done += count
    return min(pages.huge_bytes(), size)


def _check_sum(path: Path, wanted: str) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != wanted:
        raise CheckpointError(
            "the archive is not the one the manifest names",
            where=str(path),
            found=f"sha256 {digest}",
            accepted=f"sha256 {wanted}",
            advice="copy the bundle again, or compile it again",
        )


def _check_tensors(path: Path, index: rt.ParameterIndex, wanted: Mapping[str, ParameterTensor]) -> None:
    """All differences at once, for a user who mixed up two archives."""
    have: dict[str, int] = {}
    problems: list[str] = []
    for key, entry in index.items():
        if key in have:
            problems.append(f"{key}: twice in the archive")
        have[key] = entry.length
    for key, tensor in wanted.items():
        if key not in have:
            problems.append(f"{key}: want {tensor.bytes} bytes, have no such tensor")
        elif have[key] != tensor.bytes:
            problems.append(f"{key}: want {tensor.bytes} bytes, have {have[key]}")
    problems += [f"{key}: not in the manifest, have {have[key]} bytes" for key in have if key not in wanted]
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError(
            "the archive's tensors are not those the program was compiled for",
            where=str(path),
            found="; ".join(problems[:8]) + more,
            advice="use the archive written with this program",
        )
