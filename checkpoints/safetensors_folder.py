"""The tensors of a Hugging Face folder: which shard each comes from, and reading them one at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from halfbyte.checkpoints.folder import path_inside
from halfbyte.checkpoints.json_file import read_json_object
from halfbyte.checkpoints.safetensors_file import StoredTensor, read_header
from halfbyte.errors import CheckpointError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class SafetensorsFolder(Mapping[str, StoredTensor]):
    """All tensors of a folder by name, from the headers of its files.

    With an index, the index decides: a tensor comes from the shard that ``weight_map`` names, whatever else
    the shards hold. Without one it is ``model.safetensors``, else every ``*.safetensors`` file.

    Raises:
        CheckpointError: no safetensors file, a shard that is missing or lies outside the folder, a tensor the
            index promises and the shard lacks, two files with the same tensor and no index, or anything
            `read_header` refuses.
    """

    def __init__(self, folder: Path) -> None:
        self._stored = _by_index(folder) or _without_index(folder)

    def __getitem__(self, name: str) -> StoredTensor:
        return self._stored[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def split(self, name: str, parts: Mapping[str, StoredTensor]) -> None:
        """Puts tensors that lie inside of one in its place.

        Raises:
            CheckpointError: the folder already holds one of these names.
        """
        del self._stored[name]
        for part, stored in parts.items():
            if part in self._stored:
                raise CheckpointError(
                    "the tensor is there by itself and as part of a stacked one, and nothing says which counts",
                    where=part,
                    found=f"{part} and {name}",
                    accepted="one of them",
                )
            self._stored[part] = stored

    def read(self, name: str) -> torch.Tensor:
        """The tensor `name`, mapped from its file without a copy."""
        return self._stored[name].read()


def holds_weights(folder: Path) -> bool:
    """Whether the folder holds safetensors by one of the names of a model's weights."""
    if (folder / _SINGLE).exists() or any(folder.glob("*.safetensors.index.json")):
        return True
    return any(_SHARD.fullmatch(path.name) for path in folder.glob("*.safetensors"))


def refuse_pickles(folder: Path) -> None:
    """Raises a `CheckpointError` when the folder holds pickled weights, which are never loaded."""
    found = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if found:
        raise CheckpointError(
            "holds its weights as Python pickles, which can run any code when they are loaded",
            where=folder.name,
            found=", ".join(found[:5]),
            accepted="*.safetensors or one *.gguf",
            advice="convert it to safetensors, e.g. load it in transformers and save_pretrained it",
        )


def _index_path(folder: Path) -> Path | None:
    if (folder / _INDEX).exists():
        return folder / _INDEX
    found = sorted(folder.glob("*.safetensors.index.json"))
    if len(found) > 1:
        raise CheckpointError(
            "holds several indexes and none is the usual one",
            where=folder.name,
            found=", ".join(path.name for path in found[:5]),
            accepted=_INDEX,
        )
    return found[0] if found else None


def _by_index(folder: Path) -> dict[str, StoredTensor] | None:
    index = _index_path(folder)
    if index is None:
        return None
    index = path_inside(folder, index.name, named_by=folder.name)
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            "has no weight_map",
            where=index.name,
            found=type(weight_map).__name__,
            accepted="an object that gives a file name for each tensor",
        )
    # Every name is looked at before any file is opened.
    paths = {
        shard: path_inside(folder, shard, named_by=index.name) for shard in _distinct(weight_map, index.name)
    }
    headers = {shard: read_header(path) for shard, path in paths.items()}
    stored = {}
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            raise CheckpointError(
                f"says that {shard} holds the tensor {name[:200]}, but it does not",
                where=index.name,
                advice="index and shards are of different checkpoints, or one is damaged: fetch them again",
            )
        stored[name] = headers[shard][name]
    return stored


def _distinct(weight_map: dict[str, object], where: str) -> list[str]:
    names: dict[str, None] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise CheckpointError(
                f"gives no file name for {tensor[:200]}",
                where=where,
                found=repr(shard)[:200],
                accepted="a file name",
            )
        names[shard] = None
    return list(names)


def _without_index(folder: Path) -> dict[str, StoredTensor]:
    names = (
        [_SINGLE]
        if (folder / _SINGLE).exists()
        else sorted(path.name for path in folder.glob("*.safetensors"))
    )
    if not names:
        refuse_pickles(folder)
        raise CheckpointError(
            "holds no weights", where=folder.name, accepted="*.safetensors beside config.json, or one *.gguf"
        )
    _check_all_shards(names)
    stored: dict[str, StoredTensor] = {}
    for name in names:
        for tensor, entry in read_header(path_inside(folder, name, named_by=folder.name)).items():
            if tensor in stored:
                raise CheckpointError(
                    f"two files hold the tensor {tensor[:200]}, and no index says which one counts",
                    where=folder.name,
                    found=f"{stored[tensor].path.name} and {name}",
                    accepted=f"one of them, or an index ({_INDEX})",
                )
            stored[tensor] = entry
    return stored


def _check_all_shards(names: list[str]) -> None:
    for name in names:
        if match := _SHARD.fullmatch(name):
            base, _, count = match.groups()
            for number in range(1, min(int(count), 100000) + 1):
                wanted = f"{base}-{number:05d}-of-{count}.safetensors"
                if wanted not in names:
                    raise CheckpointError(
                        f"the shard {wanted} is missing", where=name, advice="fetch the missing file"
                    )
