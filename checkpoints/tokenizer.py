"""Putting a checkpoint's tokenizer beside a compiled program: tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from halfbyte.checkpoints.folder import path_inside
from halfbyte.checkpoints.json_file import read_json_object
from halfbyte.errors import CheckpointError

_TOKENIZER, _CONFIG = "tokenizer.json", "tokenizer_config.json"
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_SLOW = ("tokenizer.model", "vocab.json", "spiece.model")
_MAX_TEMPLATE = 2**20
_LOCAL = ("is_local", "local_files_only")  # how transformers found it, not what it is


def save_folder_tokenizer(
    source: Path, folder: Path, warnings: list[str], *, chat_template: str | None = None
) -> list[str]:
    """Copies the tokenizer of a model folder.

    A chat template that lies in a file of its own goes into tokenizer_config.json under ``chat_template``.

    Args:
        source: the model folder.
        folder: where to write.
        warnings: gets a line when there is a tokenizer of another kind that cannot be converted.
        chat_template: used when the folder has none.

    Returns:
        The names written, [] if there is no tokenizer.

    Raises:
        CheckpointError: a damaged file.
    """
    if not (source / _TOKENIZER).exists():
        if not any((source / name).exists() for name in _SLOW):
            return []
        return _convert(source, folder, warnings, {}, chat_template)
    read_json_object(path_inside(source, _TOKENIZER, named_by=source.name))
    shutil.copyfile(source / _TOKENIZER, folder / _TOKENIZER)
    _write_config(source, folder, chat_template)
    return [_TOKENIZER, _CONFIG]


def save_gguf_tokenizer(
    file: Path, folder: Path, warnings: list[str], chat_template: str | None, vocabulary: int
) -> list[str]:
    """The tokenizer of a GGUF file: tokenizer.json beside it if there is one, else converted by transformers.

    Args and Returns as in `save_folder_tokenizer`; `vocabulary` is the number of tokens the model knows. The
    conversion takes some seconds.
    """
    if (file.parent / _TOKENIZER).exists():
        return save_folder_tokenizer(file.parent, folder, warnings, chat_template=chat_template)
    names = _convert(file.parent, folder, warnings, {"gguf_file": file.name}, chat_template)
    if names:
        _drop_unknown_tokens(folder / _TOKENIZER, vocabulary)
        warnings.append(
            "transformers converted the tokenizer from the GGUF file's metadata; it may split rare texts "
            "otherwise than the original: put the original tokenizer.json beside the file to use that"
        )
    return names


def gguf_tokenizer_source(
    file: Path, header: int, chat_template: str | None, vocabulary: int
) -> bytes | None:
    """A digest of what `save_gguf_tokenizer` converts: the file's header and the small files beside it.

    Args:
        file, chat_template, vocabulary: as for `save_gguf_tokenizer`.
        header: bytes of the header.

    Returns:
        None where there is a tokenizer.json, which is copied.
    """
    if (file.parent / _TOKENIZER).exists():
        return None
    digest = hashlib.sha256(f"{chat_template}\0{vocabulary}\0".encode())
    with file.open("rb") as opened:
        digest.update(opened.read(header))
    for beside in sorted((*file.parent.glob("*.json"), *file.parent.glob("*.jinja"))):
        digest.update(f"\0{beside.name}\0".encode())
        digest.update(beside.read_bytes())
    return digest.digest()


def _convert(
    source: Path, folder: Path, warnings: list[str], options: dict[str, Any], chat_template: str | None
) -> list[str]:
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as made:
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                str(source), local_files_only=True, trust_remote_code=False, **options
            )
            tokenizer.save_pretrained(made)
        except Exception as error:  # whatever transformers runs into: the program works without a tokenizer
            warnings.append(f"the tokenizer could not be converted: {type(error).__name__}: {error}"[:500])
            return []
        if not (Path(made) / _TOKENIZER).exists():
            warnings.append("the tokenizer cannot be converted to tokenizer.json")
            return []
        shutil.copyfile(Path(made) / _TOKENIZER, folder / _TOKENIZER)
        _write_config(Path(made), folder, chat_template)
    return [_TOKENIZER, _CONFIG]


def _drop_unknown_tokens(path: Path, vocabulary: int) -> None:
    """Takes out tokens that transformers adds in converting and the model has no embedding for."""
    values = read_json_object(path)
    added = values.get("added_tokens") or []
    values["added_tokens"] = [token for token in added if token["id"] < vocabulary]
    if len(values["added_tokens"]) < len(added):
        path.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")


def _write_config(source: Path, folder: Path, fallback: str | None) -> None:
    config: dict[str, Any] = {}
    if (source / _CONFIG).exists():
        config = read_json_object(path_inside(source, _CONFIG, named_by=source.name))
    for key in _LOCAL:
        config.pop(key, None)
    # A template in a file of its own is the newer place and wins, as in transformers.
    template = _template_file(source) or config.get("chat_template") or fallback
    if template is not None:
        config["chat_template"] = template
    (folder / _CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _template_file(source: Path) -> Any:
    for name in _TEMPLATES:
        if not (source / name).exists():
            continue
        path = path_inside(source, name, named_by=source.name)
        if path.suffix == ".json":
            return read_json_object(path).get("chat_template")
        try:
            if path.stat().st_size > _MAX_TEMPLATE:
                raise CheckpointError(
                    "is too large for a chat template", where=name, accepted=f"{_MAX_TEMPLATE} bytes"
                )
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError("cannot be read", where=name, found=str(error)) from None
    return None
