"""A tokenizer that had to be converted is converted once, as long as nothing that it is made of changes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from halfbyte.checkpoints import open_checkpoint
from halfbyte.kept_tokenizer import save_tokenizer


def test_the_second_comes_from_the_cache(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, source = tmp_path / "cache", tmp_path / "source"
    monkeypatch.setenv("HALFBYTE_CACHE", str(cache))
    source.mkdir()
    shutil.copy(data / "llama-gguf-q4_0" / "model.gguf", source)

    def saved(name: str) -> tuple[dict[str, str], list[str]]:
        out = tmp_path / name
        out.mkdir()
        checkpoint = open_checkpoint(source / "model.gguf")
        names = save_tokenizer(checkpoint, out, True)
        assert sorted(names) == sorted(path.name for path in out.iterdir())
        return {name: (out / name).read_text() for name in names}, list(checkpoint.warnings)

    first, warnings = saved("first")
    assert set(first) == {"tokenizer.json", "tokenizer_config.json"}
    assert any("converted the tokenizer" in warning for warning in warnings)
    [kept] = cache.glob("*.tokenizer.json")
    whole = kept.read_text()
    marked = json.loads(whole)
    marked["files"]["tokenizer_config.json"] = "{}"
    kept.write_text(json.dumps(marked))
    second, again = saved("second")
    assert second == {**first, "tokenizer_config.json": "{}"} and again == warnings  # so it was read there
    for broken in (whole[: len(whole) // 2], json.dumps({"files": {"../x": "y"}, "warnings": []}), "[]"):
        kept.write_text(broken)
        assert saved(f"after {broken[:3]} {len(broken)}") == (first, warnings)
        assert json.loads(kept.read_text()) == json.loads(whole)
    (source / "tokenizer_config.json").write_text('{"unk_token": "<unk>"}')
    saved("changed")
    assert len(list(cache.glob("*.tokenizer.json"))) == 2


def test_what_is_copied_is_not_kept(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "cache"))
    assert save_tokenizer(open_checkpoint(data / "base-gptq"), tmp_path, True)
    assert not (tmp_path / "cache").exists()
