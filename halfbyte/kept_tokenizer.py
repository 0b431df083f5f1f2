"""Keeps tokenizers that took a conversion, so that the same file is converted once."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfbyte.checkpoints import Checkpoint

_CONVERTERS = ("transformers", "tokenizers", "gguf")
_FILES = ("tokenizer.json", "tokenizer_config.json")


def save_tokenizer(checkpoint: Checkpoint, folder: Path, cache: bool) -> list[str]:
    """`Checkpoint.save_tokenizer`, from the cache where it holds what the same source was converted to."""
    from halfbyte.lowering.cache import keep

    source = checkpoint.tokenizer_source() if cache else None
    if source is None:
        return checkpoint.save_tokenizer(folder)
    kept = _place(source)
    if (found := _read(kept)) is not None:
        files, warnings = found
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        checkpoint.warnings.extend(warnings)
        return list(files)
    before = len(checkpoint.warnings)
    names = checkpoint.save_tokenizer(folder)
    if names:
        files = {name: (folder / name).read_text(encoding="utf-8") for name in names}
        keep(kept, json.dumps({"files": files, "warnings": checkpoint.warnings[before:]}).encode())
    return names


def _place(source: bytes) -> Path:
    from halfbyte.checkpoints import tokenizer
    from halfbyte.lowering.cache import cache_folder

    digest = hashlib.sha256(source)
    for package in _CONVERTERS:
        digest.update(f"{package} {version(package)}\0".encode())
    for code in (tokenizer.__file__, __file__):
        digest.update(Path(code).read_bytes())
    return cache_folder() / f"{digest.hexdigest()}.tokenizer.json"


def _read(kept: Path) -> tuple[dict[str, str], list[str]] | None:
    """None if there is none, or not a whole one."""
    try:
        found = json.loads(kept.read_text(encoding="utf-8"))
        files, warnings = found["files"], found["warnings"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    texts = [*files.values(), *warnings]
    whole = tuple(files) == _FILES and all(isinstance(text, str) for text in texts)
    return (files, warnings) if whole else None
