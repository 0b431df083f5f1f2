"""Reading a JSON object from an untrusted file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from halfbyte.errors import CheckpointError

_MAX_BYTES = 256 * 2**20  # the index of a model with 100000 tensors has about 10 MB


def parse_json_object(text: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `text`; `where` names the file in errors.

    Raises:
        CheckpointError: no JSON, not UTF-8, nested too deeply, not an object, or an object with a key twice.
    """
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise CheckpointError("is not UTF-8 text", where=where, found=str(error)) from None
    except RecursionError:
        raise CheckpointError("is nested too deeply to be a configuration", where=where) from None
    except ValueError as error:
        raise CheckpointError("is not valid JSON", where=where, found=str(error)) from None
    if not isinstance(value, dict):
        raise CheckpointError("must hold a JSON object", where=where, found=type(value).__name__)
    return value


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a file that must hold one JSON object, at most 256 MiB.

    Raises:
        CheckpointError: unreadable, too large, or anything `parse_json_object` refuses.
    """
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise CheckpointError(
                "is too large for a JSON file of a model",
                where=path.name,
                found=f"{size} bytes",
                accepted=f"{_MAX_BYTES}",
            )
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError("cannot be read", where=path.name, found=error.strerror or str(error)) from None
    return parse_json_object(text, path.name)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:200]!r} stands there twice")
    return made
