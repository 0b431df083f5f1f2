"""Where the quantization configuration is found, and what happens when there are two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_checkpoints import Q_PROJ, float_tensors, gptq_parts, llama_config, random_layer, write_folder

from halfbyte.checkpoints import open_checkpoint
from halfbyte.checkpoints.quantization_config import find_quantization_config
from halfbyte.errors import CheckpointError

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": GPTQ},
        {"compression_config": GPTQ},
        {"text_config": {"quantization_config": GPTQ}},
    ],
)
def test_inside_config_json(tmp_path: Path, config: dict[str, Any]) -> None:
    found = find_quantization_config(tmp_path, config)
    assert found is not None
    assert (found.method, found.values) == ("gptq", GPTQ)


@pytest.mark.parametrize(
    ("name", "values", "method"),
    [
        ("quantize_config.json", GPTQ, "gptq"),
        ("quantize_config.json", {"bits": 4}, "gptq"),
        ("quant_config.json", {"w_bit": 4}, "awq"),
        ("quant_config.json", GPTQ, "gptq"),
        ("quantization_config.json", {"quant_method": "Auto-Round"}, "auto-round"),
        ("hf_quant_config.json", {"quantization": {}}, "modelopt"),
    ],
)
def test_in_a_file_of_its_own(tmp_path: Path, name: str, values: dict[str, Any], method: str) -> None:
    (tmp_path / name).write_text(json.dumps(values))
    found = find_quantization_config(tmp_path, {})
    assert found is not None
    assert (found.method, found.where) == (method, name)


def test_none(tmp_path: Path) -> None:
    assert find_quantization_config(tmp_path, {"text_config": None}) is None


@pytest.mark.parametrize(
    "change",
    [
        {"bits": 8},
        {"group_size": 64},
        {"sym": True},
        {"quant_method": "awq"},
        {"checkpoint_format": "gptq_v2"},
        {"desc_act": True},
    ],
)
def test_two_that_disagree(tmp_path: Path, change: dict[str, Any]) -> None:
    first = GPTQ | {"checkpoint_format": "gptq", "desc_act": False}
    (tmp_path / "quantize_config.json").write_text(json.dumps(first | change))
    with pytest.raises(CheckpointError, match="disagree") as error:
        find_quantization_config(tmp_path, {"quantization_config": first})
    assert "quantize_config.json" in str(error.value)


def test_two_that_say_the_same_in_other_words(tmp_path: Path) -> None:
    (tmp_path / "quant_config.json").write_text(json.dumps({"quant_method": "gptq", "w_bit": 4, "meta": {}}))
    assert find_quantization_config(tmp_path, {"quantization_config": GPTQ}) is not None


@pytest.mark.parametrize("bad", [[], "gptq", 4, {}, {"quant_method": 4}, {"quant_method": None}])
def test_malformed(tmp_path: Path, bad: Any) -> None:
    with pytest.raises(CheckpointError, match="quantization_config"):
        find_quantization_config(tmp_path, {"quantization_config": bad})


def test_a_folder_with_quantize_config_json_alone_is_read(tmp_path: Path) -> None:
    tensors = float_tensors(llama_config()) | gptq_parts(Q_PROJ, *random_layer((64, 64), 2))
    del tensors[f"{Q_PROJ}.weight"]
    write_folder(tmp_path, llama_config(), tensors)
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32}))
    assert open_checkpoint(tmp_path).layers[Q_PROJ].scheme is not None


def test_quantized_tensors_without_any_configuration_are_refused(tmp_path: Path) -> None:
    tensors = float_tensors(llama_config()) | gptq_parts(Q_PROJ, *random_layer((64, 64), 2))
    del tensors[f"{Q_PROJ}.weight"]
    write_folder(tmp_path, llama_config(), tensors)
    with pytest.raises(CheckpointError, match="no quantization configuration"):
        open_checkpoint(tmp_path)
