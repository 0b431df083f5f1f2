"""Tokenizers that go along with a checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from halfbyte.checkpoints import open_checkpoint
from halfbyte.errors import CheckpointError


@pytest.fixture
def folder(data: Path, tmp_path: Path) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(data / "base-gptq" / name, source)
    return source


def saved(source: Path, out: Path) -> tuple[list[str], dict[str, object]]:
    out.mkdir()
    names = open_checkpoint(source).save_tokenizer(out)
    assert sorted(names) == sorted(path.name for path in out.iterdir())
    config = out / "tokenizer_config.json"
    return names, json.loads(config.read_text()) if config.exists() else {}


def test_copied_as_it_is(folder: Path, tmp_path: Path) -> None:
    names, config = saved(folder, tmp_path / "out")
    assert names == ["tokenizer.json", "tokenizer_config.json"]
    assert config == json.loads((folder / "tokenizer_config.json").read_text())
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("name", "text"),
    [("chat_template.jinja", "{{ 'ü' }}"), ("chat_template.json", '{"chat_template": "{{ \'ü\' }}"}')],
)
def test_a_template_of_its_own_goes_into_the_configuration(
    folder: Path, tmp_path: Path, name: str, text: str
) -> None:
    (folder / name).write_text(text, encoding="utf-8")
    _, config = saved(folder, tmp_path / "out")
    assert config["chat_template"] == "{{ 'ü' }}"


def test_none(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert saved(folder, tmp_path / "out") == ([], {})


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_damaged(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / name).write_text("{")
    with pytest.raises(CheckpointError, match=name):
        saved(folder, tmp_path / "out")


def test_a_link_out_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").rename(tmp_path / "elsewhere.json")
    (folder / "tokenizer.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        saved(folder, tmp_path / "out")


def test_beside_a_gguf_file(data: Path, tmp_path: Path) -> None:
    names, _ = saved(data / "llama-gguf-q4_0", tmp_path / "out")
    assert names == ["tokenizer.json", "tokenizer_config.json"]


def test_out_of_a_gguf_file(data: Path, tmp_path: Path) -> None:
    source = tmp_path / "alone"
    source.mkdir()
    shutil.copy(data / "llama-gguf-q4_0" / "model.gguf", source)
    names, config = saved(source, tmp_path / "out")
    assert names == ["tokenizer.json", "tokenizer_config.json"]
    assert not any("local" in key for key in config)
    ours = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert ours.get_vocab_size() == 512
