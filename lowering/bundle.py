"""Writes a bundle: everything into a folder beside the target, renamed at the end, so no half of it is ever seen."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from halfbyte.errors import UsageError
from halfbyte.runtime.manifest import FILE_NAME, Manifest, Tensor


@contextlib.contextmanager
def bundle_folder(out: Path) -> Iterator[Path]:
    """A new folder that becomes ``out`` when the block ends well, and is gone when it does not.

    Raises:
        UsageError: ``out`` exists and is no bundle, so replacing it could lose somebody's files.
    """
    check_replaceable(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    partial.chmod(0o755)
    try:
        yield partial
        old = None
        if out.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".old", dir=out.parent))
            out.rename(old / out.name)
        partial.rename(out)
        if old is not None:
            shutil.rmtree(old)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_replaceable(out: Path) -> None:
    """Raises UsageError if ``out`` exists and is neither a bundle nor an empty folder."""
    if out.is_dir() and ((out / FILE_NAME).is_file() or not any(out.iterdir())):
        return
    if out.exists() or out.is_symlink():
        raise UsageError(
            "the output exists and is not a bundle",
            where=str(out),
            accepted="a new path, an empty folder, or a bundle to replace",
            advice="choose another output or remove it",
        )


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_flag_files(folder: Path, manifest: Manifest) -> None:
    """``<entry>.flags`` for iree-run-module, for use in the bundle's folder: module, parameters, function, caches.

    They are for the first program; those of other targets are ``<entry>.<target>.flags``.
    Inputs before ``--flagfile`` come first, so the caches a flag file gives (zeros) follow the caller's inputs.
    """
    caches = {cache.name for cache in manifest.caches}
    first = {program.target: program for program in reversed(manifest.programs)}
    for program in first.values():
        target = "" if program is manifest.programs[0] else f".{program.target}"
        for name, entry in manifest.entry_points.items():
            lines = [f"--module={program.file}"]
            lines += [f"--parameters={archive.scope}={archive.file}" for archive in manifest.parameters]
            lines += [f"--device={program.drivers[0]}", f"--function={name}"]
            lines += [f"--input={_spelled(tensor)}=0" for tensor in entry.inputs if tensor.name in caches]
            (folder / f"{name}{target}.flags").write_text("\n".join(lines) + "\n")


def run_line(manifest: Manifest, out: Path) -> str:
    """An iree-run-module command that runs the simplest entry point of the bundle."""
    caches = {cache.name for cache in manifest.caches}
    name = "forward" if "forward" in manifest.entry_points else next(iter(manifest.entry_points))
    inputs = [
        f'--input="{_spelled(tensor, 4)}={1 if tensor.dtype.startswith("i") else 0.5}"'
        for tensor in manifest.entry_points[name].inputs
        if tensor.name not in caches
    ]
    return f"cd {shlex.quote(str(out))} && iree-run-module {' '.join(inputs)} --flagfile={name}.flags"


def _spelled(tensor: Tensor, dynamic: int = 1) -> str:
    sizes = [str(dynamic if isinstance(size, str) else size) for size in tensor.shape]
    return "x".join([*sizes, tensor.dtype])
