"""Paths inside a model folder: a file of the folder may name another one, but never one outside of it."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from halfbyte.errors import CheckpointError


def path_inside(folder: Path, name: object, *, named_by: str) -> Path:
    """The path of the file `name` in `folder`.

    A link may lead out of the folder only the way the cache of huggingface_hub does it: from
    ``snapshots/<revision>/`` to ``blobs/`` of the same repository.

    Args:
        folder: the model folder.
        name: as written in the file `named_by`; a relative path with ``/``.
        named_by: the file that names it, for the error.

    Raises:
        CheckpointError: naming `name` as written, when it is not a plain relative path, leaves the folder or
            does not exist.
    """
    if not isinstance(name, str) or not name or "\0" in name or len(name) > 1000:
        raise CheckpointError(
            "names something that is no file name",
            where=named_by,
            found=repr(name)[:200],
            accepted="a file name",
        )
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or ":" in name:
        raise _outside(name, named_by)
    path = folder / pure
    if not path.exists():
        raise CheckpointError(
            f"names the file {name}, which is not in the folder",
            where=named_by,
            found=f"no {name}",
            advice="fetch the missing file",
        )
    if not _stays(folder, path):
        raise _outside(name, named_by)
    if not path.is_file():
        raise CheckpointError(f"names {name}, which is not a file", where=named_by)
    return path


def _stays(folder: Path, path: Path) -> bool:
    root = folder.resolve()
    target = path.resolve()
    if target.is_relative_to(root):
        return True
    return root.parent.name == "snapshots" and target.is_relative_to(root.parent.parent / "blobs")


def _outside(name: str, named_by: str) -> CheckpointError:
    return CheckpointError(
        f"names the file {name}, which lies outside the model folder",
        where=named_by,
        found=name,
        accepted="files inside the folder",
        advice="do not use this checkpoint unless you trust it; a good index has plain file names",
    )
