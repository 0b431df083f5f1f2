"""A second compilation of the same model neither exports nor imports, and makes the same bundle."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_experts import made_model, quantize, write_experts
from model_families import DENSE

import halfbyte
from halfbyte.lowering import decoder, importer
from halfbyte.runtime.logits import all_logits

TOKENS = [3, 9, 31, 0, 17, 8]


class _Graphs:
    """Counts the models that were exported and the programs that were imported."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.exported = self.imported = 0
        export, import_entries = decoder.export_decoder, importer.import_entries

        def exporting(*given: Any) -> Any:
            self.exported += 1
            return export(*given)

        def importing(*given: Any) -> Any:
            self.imported += 1
            return import_entries(*given)

        monkeypatch.setattr(decoder, "export_decoder", exporting)
        monkeypatch.setattr(importer, "import_entries", importing)

    def taken(self) -> tuple[int, int]:
        counts = self.exported, self.imported
        self.exported = self.imported = 0
        return counts


def made_family(folder: Path, seed: int) -> tuple[Path, np.ndarray]:
    # q, k and v have biases, and are merged.
    made = made_model("qwen2 windowed", seed, DENSE, num_hidden_layers=1, layer_types=["sliding_attention"])
    quantize(made, lambda name: "lm_head" not in name)
    return write_experts(folder, made), made.logits(TOKENS)


def test_the_second_bundle_is_the_first_made_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("HALFBYTE_CACHE", str(cache))
    graphs = _Graphs(monkeypatch)
    folder, want = made_family(tmp_path / "model", 0)
    options = halfbyte.CompileOptions(max_context=32)

    def compiled(name: str, **changed: Any) -> dict[str, Any]:
        out = tmp_path / name
        report = halfbyte.compile(folder, out, halfbyte.CompileOptions(**{**vars(options), **changed})).report
        assert np.abs(all_logits(halfbyte.load(out), TOKENS) - want).max() <= 1e-5 * np.abs(want).max()
        return {key: value for key, value in report.items() if key not in ("seconds", "passes")}

    first = compiled("first")
    assert graphs.taken() == (1, 1)
    assert compiled("second") == first and first["merged"]
    assert graphs.taken() == (0, 0)
    files = sorted(path.name for path in (tmp_path / "first").iterdir() if path.name != "report.json")
    for file in files:
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()

    assert first["fused"]
    [kept] = cache.glob("*.import.json")
    whole = kept.read_text()
    for broken in (whole[: len(whole) // 2], json.dumps({**json.loads(whole), "merges": {"a": 3}})):
        kept.write_text(broken)
        assert compiled("second") == first
        assert graphs.taken() == (1, 1) and kept.read_text() == whole

    # Other values of the weights leave the graphs as they are; another configuration does not.
    shutil.rmtree(folder)
    folder, want = made_family(folder, 1)
    compiled("scaled")
    assert graphs.taken() == (0, 0)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-2}))
    halfbyte.compile(folder, tmp_path / "other", options)
    assert graphs.taken() == (1, 1)
