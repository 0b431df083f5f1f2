"""Telling formats apart."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from made_checkpoints import float_tensors, llama_config, write_folder

from halfbyte.checkpoints import open_checkpoint
from halfbyte.errors import CheckpointError


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        open_checkpoint(tmp_path / "none")


def test_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(tmp_path)


def test_a_folder_of_pickles(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="pickle"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin", "config.json"])
def test_a_file_that_is_no_checkpoint(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=name):
        open_checkpoint(tmp_path / name)


def test_several_gguf_files(data: Path, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(data / "llama-gguf-q4_0" / "model.gguf", tmp_path / name)
    with pytest.raises(CheckpointError, match=r"a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path / "b.gguf").format == "gguf"


def test_safetensors_go_before_a_gguf_beside_them(data: Path, tmp_path: Path) -> None:
    write_folder(tmp_path, llama_config(), float_tensors(llama_config()))
    shutil.copy(data / "llama-gguf-q4_0" / "model.gguf", tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.format == "float"
    assert any("model.gguf" in text for text in checkpoint.warnings)


@pytest.mark.parametrize("method", ["bitsandbytes"])
def test_methods_of_other_versions(tmp_path: Path, method: str) -> None:
    folder = write_folder(tmp_path, llama_config(), float_tensors(llama_config()), {"quant_method": method})
    with pytest.raises(CheckpointError, match="not supported yet") as error:
        open_checkpoint(folder)
    assert method in str(error.value)
    assert "gptq, " in str(error.value)


@pytest.mark.parametrize("method", ["auto-round", "intel/auto-round", "inc", "AUTO-ROUND"])
def test_names_of_auto_round(data: Path, tmp_path: Path, method: str) -> None:
    source = data / "llama-autoround-mixed-bits"
    for name in ("config.json", "model.safetensors"):
        text = (source / name).read_bytes()
        if name == "config.json":
            text = text.replace(b'"quant_method": "auto-round"', f'"quant_method": "{method}"'.encode())
            text = text.replace(b'"packing_format": "auto_round:auto_gptq",', b"")  # missing means this one
        (tmp_path / name).write_bytes(text)
    assert open_checkpoint(tmp_path).format == "auto-round (gptq v1)"


def test_a_relative_path(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data / "base-gptq")
    assert open_checkpoint(".").path == data / "base-gptq"
