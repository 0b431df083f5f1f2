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
            found=f"{size} of {archive.bytes} bytes: {one_line(error)}",
            advice="copy the bundle again",
        ) from None
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
    pages: HugePages | None = None
    if mode == "huge" and not reason:
        try:
            pages = _read(path, size)
        except MemoryError as error:
            reason = str(error)
    if pages is None:
        return LoadedArchive(index, archive.scope, Residence(archive.file, "mmap", size, 0, reason))
    held = rt.ParameterIndex()
    for key, entry in index.items():
        if entry.is_file:
            _, offset = entry.file_storage
            held.add_buffer(key, pages.array[offset : offset + entry.length])
        else:
            held.add_splat(key, entry.splat_pattern, entry.length)
    return LoadedArchive(
        held, archive.scope, Residence(archive.file, "huge", size, min(pages.huge_bytes(), size))
    )


def _read(path: Path, size: int) -> HugePages:
    """The whole file, so that every tensor keeps the alignment it has there."""
    pages = HugePages(size)
    with path.open("rb", buffering=0) as file:
        done = 0
        while done < size:
            count = file.readinto(pages.array[done : min(done + _PIECE, size)].data)
            if not count:
                raise CheckpointError("parameter archive shrank while being read", where=str(path))
            done += count
    return pages


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
