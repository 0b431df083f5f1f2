"""Which shard a tensor comes from, and paths that lead out of the folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.errors import CheckpointError

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def shards(folder: Path, one: dict[str, float], two: dict[str, float], weight_map: Any = None) -> Path:
    folder.mkdir(exist_ok=True)
    for name, values in ((ONE, one), (TWO, two)):
        save_file({key: torch.tensor([value]) for key, value in values.items()}, folder / name)
    if weight_map is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("order", [(ONE, TWO), (TWO, ONE)])
def test_the_index_decides_whatever_else_the_shards_hold(tmp_path: Path, order: tuple[str, str]) -> None:
    """Case 71."""
    weight_map = {"a": order[0], "b": order[1]}
    found = SafetensorsFolder(shards(tmp_path, {"a": 1, "b": 1}, {"a": 2, "b": 2}, weight_map))
    wanted = {name: 1.0 if shard == ONE else 2.0 for name, shard in weight_map.items()}
    assert {name: found.read(name).item() for name in found} == wanted


def test_without_an_index_all_files_count(tmp_path: Path) -> None:
    found = SafetensorsFolder(shards(tmp_path, {"a": 1}, {"b": 2}))
    assert {name: found.read(name).item() for name in found} == {"a": 1, "b": 2}


def test_without_an_index_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="two files hold the tensor a") as error:
        SafetensorsFolder(shards(tmp_path, {"a": 1}, {"a": 1}))
    assert ONE in str(error.value)
    assert TWO in str(error.value)


@pytest.mark.parametrize("weight_map", [None, {"a": ONE, "b": TWO}])
def test_a_missing_shard_is_named(tmp_path: Path, weight_map: Any) -> None:
    """Case 70."""
    folder = shards(tmp_path, {"a": 1}, {"b": 2}, weight_map)
    (folder / TWO).unlink()
    with pytest.raises(CheckpointError, match=TWO):
        SafetensorsFolder(folder)


def test_a_tensor_the_shard_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds the tensor c") as error:
        SafetensorsFolder(shards(tmp_path, {"a": 1}, {"b": 2}, {"a": ONE, "c": TWO}))
    assert TWO in str(error.value)


@pytest.mark.parametrize(
    "name",
    ["../outside.safetensors", "/etc/hostname", "x/../../outside.safetensors", "..", "a\\..\\b", "C:x"],
)
def test_a_path_out_of_the_folder_is_named_as_written(tmp_path: Path, name: str) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "outside.safetensors")
    with pytest.raises(CheckpointError, match="outside the model folder") as error:
        SafetensorsFolder(shards(tmp_path / "model", {"a": 1}, {"b": 2}, {"a": name}))
    assert name in str(error.value)


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "outside.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(CheckpointError, match="outside the model folder"):
        SafetensorsFolder(folder)


def test_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    folder.mkdir(parents=True)
    save_file({"a": torch.ones(1)}, blobs / "0123")
    (folder / "model.safetensors").symlink_to("../../blobs/0123")
    assert SafetensorsFolder(folder).read("a").item() == 1


@pytest.mark.parametrize(
    "weight_map", [[], {}, "x", {"a": 4}, {"a": None}, {"a": ""}, {"a": "\0"}, {"a": "."}]
)
def test_a_malformed_index(tmp_path: Path, weight_map: Any) -> None:
    with pytest.raises(CheckpointError, match=r"index\.json"):
        SafetensorsFolder(shards(tmp_path, {"a": 1}, {"b": 2}, weight_map))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_with_advice(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match="pickle") as error:
        SafetensorsFolder(tmp_path)
    assert "safetensors" in str(error.value)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no weights"):
        SafetensorsFolder(tmp_path)
