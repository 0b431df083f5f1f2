"""AutoRound: how layers are looked up, packings, and what is handed over to other readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_checkpoints import (
    DOWN_PROJ,
    Q_PROJ,
    awq_parts,
    dequantized,
    float_tensors,
    gptq_parts,
    linear_shapes,
    llama_config,
    packed_folder,
    random_layer,
    write_folder,
)
from safetensors.torch import load_file, save_file

from halfbyte.checkpoints import Checkpoint, open_checkpoint
from halfbyte.checkpoints.auto_round import auto_round_config
from halfbyte.checkpoints.auto_round_handover import other_method
from halfbyte.checkpoints.packed_config import PackedConfig
from halfbyte.checkpoints.quantization_config import QuantizationConfig
from halfbyte.errors import CheckpointError
from halfbyte.passes.scheme import Zero


def auto_round(**values: Any) -> PackedConfig:
    return auto_round_config(
        QuantizationConfig("auto-round", {"bits": 4, "group_size": 128} | values, "config.json")
    )


def bits(config: PackedConfig, layer: str) -> int | None:
    setting = config.setting(layer)
    return None if setting is None else setting.bits


def test_lm_head_is_float_unless_said() -> None:
    assert auto_round().setting("lm_head") is None
    assert auto_round(extra_config={"lm_head": {"bits": 4}}).setting("lm_head") is not None


def test_auto_round_looks_up_exact_names_first() -> None:
    extra = {
        r".*layers\.0.*": {"bits": 16},
        "mlp.up_proj": {"bits": 8},
        "model.layers.0.mlp.up_proj": {"bits": 4, "group_size": 32},
    }
    config = auto_round(extra_config=extra)
    exact = config.setting("model.layers.0.mlp.up_proj")
    assert exact is not None
    assert (exact.bits, exact.group_size) == (4, 32)
    assert bits(config, "model.layers.1.mlp.up_proj") == 8
    assert bits(config, "model.layers.0.mlp.gate_proj") is None
    assert bits(config, "model.layers.1.mlp.gate_proj") == 4


@pytest.mark.parametrize("blocks", ["model.layers", ["model.layers"], "model.layers.0, model.layers.1"])
def test_auto_round_blocks(blocks: Any) -> None:
    config = auto_round(block_name_to_quantize=blocks)
    assert config.setting("model.layers.1.mlp.up_proj") is not None
    assert config.setting("vision.layers.1.mlp.up_proj") is None


def test_a_block_is_no_prefix_of_another_number() -> None:
    config = auto_round(to_quant_block_names="model.layers.1")
    assert config.setting("model.layers.1.mlp.up_proj") is not None
    assert config.setting("model.layers.10.mlp.up_proj") is None


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"packing_format": "auto_round:mlx"}, "mlx"),
        ({"packing_format": ["auto_round:auto_gptq"]}, "packing_format"),
        ({"data_type": "mx_fp"}, "mx_fp"),
        ({"act_bits": 8}, "act_bits"),
        ({"extra_config": []}, "extra_config"),
        ({"extra_config": {"lm_head": 4}}, "lm_head"),
        ({"extra_config": {"lm_head": {"bits": 8, "data_type": "fp"}}}, "data_type 'fp'"),
    ],
)
def test_auto_round_files_of_other_kinds(values: dict[str, Any], name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        auto_round(**values)


@pytest.mark.parametrize(
    "pattern", [r".*model\.layers\.0\.mlp\.gate.*", r"model\.layers\.0\.mlp\.gate.*", r".*mlp\.gate.*"]
)
def test_a_pattern_for_a_router_is_no_pattern_for_gate_proj(pattern: str) -> None:
    """auto-round writes it for every router; searched for as it stands, it is found in gate_proj too."""
    config = auto_round(extra_config={pattern: {"bits": 16, "data_type": "float"}})
    assert config.setting("model.layers.0.mlp.gate") is None
    assert bits(config, "model.layers.0.mlp.gate_proj") == 4
    assert bits(config, "model.layers.0.mlp.gate_up_proj") == 4
    assert config.setting("model.layers.0.mlp.gate.expert") is None


def test_other_patterns_are_searched_for() -> None:
    config = auto_round(extra_config={r"mlp\.(gate|up)_proj": {"bits": 8}, ".*": {"bits": 16}})
    assert bits(config, "model.layers.0.mlp.gate_proj") == 8
    assert config.setting("model.layers.0.mlp.down_proj") is None


def opened(folder: Path, parts: dict[str, np.ndarray], **said: Any) -> Checkpoint:
    """A llama with the given layers; the configuration leaves the others in float."""
    floats = {name: {"bits": 16} for name in linear_shapes(llama_config()) if f"{name}.qweight" not in parts}
    extra = floats | said.pop("extra_config", {})
    values = {"quant_method": "auto-round", "sym": False, "extra_config": extra} | said
    return open_checkpoint(packed_folder(folder, llama_config(), parts, **values))


@pytest.mark.parametrize(
    ("packing", "storage"),
    [
        (None, "gptq v1"),
        ("auto_round:auto_gptq", "gptq v1"),
        ("auto_round:gptq", "gptq v1"),
        ("auto_round:auto_awq", "awq"),
        ("auto_round:awq", "awq"),
        ("auto_round", "gptq v2"),
        ("auto_round:gptqmodel", "gptq v2"),
    ],
)
def test_packings(tmp_path: Path, packing: str | None, storage: str) -> None:
    """No g_idx, negative scales, zero points that all differ."""
    codes, zeros, scales = random_layer((64, 64), 2)
    parts = awq_parts(Q_PROJ, codes, zeros, scales)
    if storage != "awq":
        parts = gptq_parts(Q_PROJ, codes, zeros, scales, version=int(storage[-1]))
    checkpoint = opened(tmp_path, parts, packing_format=packing or "auto_round:auto_gptq")
    assert checkpoint.layers[Q_PROJ].storage == storage
    wanted = dequantized(codes, zeros, scales, np.arange(64) // 32)
    assert (scales < 0).any()
    np.testing.assert_array_equal(checkpoint.quantized(Q_PROJ).dequantize().numpy(), wanted)
    assert checkpoint.warnings == []


def test_tensors_decide_against_the_packing(tmp_path: Path) -> None:
    codes, zeros, scales = random_layer((64, 64), 2)
    wanted = dequantized(codes, zeros, scales, np.arange(64) // 32)
    for said, parts in (
        ("auto_round:auto_gptq", awq_parts(Q_PROJ, codes, zeros, scales)),
        ("auto_round:auto_awq", gptq_parts(Q_PROJ, codes, zeros, scales)),
    ):
        checkpoint = opened(tmp_path / said[-4:], parts, packing_format=said)
        np.testing.assert_array_equal(checkpoint.quantized(Q_PROJ).dequantize().numpy(), wanted)
        (warning,) = checkpoint.warnings
        assert "awq" in warning and "gptq v1" in warning and Q_PROJ in warning


def test_layers_outside_the_blocks_and_of_other_widths(tmp_path: Path) -> None:
    narrow, wide = random_layer((64, 64), 2), random_layer((64, 96), 6, bits=8)
    parts = gptq_parts(Q_PROJ, *narrow) | gptq_parts(DOWN_PROJ, *wide, bits=8)
    rules = {"layers.0.mlp.down_proj": {"bits": 8, "group_size": 16}}
    extra: dict[str, Any] = {"extra_config": rules, "block_name_to_quantize": "model.layers.0"}
    checkpoint = opened(tmp_path, parts, **extra)
    assert checkpoint.warnings == []
    schemes = {name: info.scheme for name, info in checkpoint.layers.items() if info.scheme}
    assert {name: (scheme.bits, scheme.group_size) for name, scheme in schemes.items()} == {
        Q_PROJ: (4, 32),
        DOWN_PROJ: (8, 16),
    }
    assert schemes[DOWN_PROJ].zero is Zero.INTEGER


def handed(**values: Any) -> dict[str, Any]:
    said = {"quant_method": "auto-round", "bits": 8, "group_size": -1, "sym": True} | values
    other = other_method(QuantizationConfig("auto-round", said, "config.json"))
    assert other is not None
    assert other.where == "config.json"
    assert other.method == other.values["quant_method"]
    return other.values


def test_llm_compressor_files_in_the_words_of_compressed_tensors() -> None:
    acts = {"act_bits": 8, "act_data_type": "int", "act_dynamic": True, "act_sym": True}
    extra = {"model.layers.0.mlp.down_proj": {"bits": 16}, "model.layers.0.mlp.up_proj": {"bits": 8}}
    found = handed(packing_format="auto_round:llm_compressor", extra_config=extra, **acts)
    (group,) = found["config_groups"].values()
    assert group["targets"] == ["Linear"]
    assert group["weights"] == {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "channel",
        "group_size": None,
        "dynamic": False,
    }
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    assert group["input_activations"] == inputs
    assert found["ignore"] == ["lm_head", "model.layers.0.mlp.down_proj"]
    grouped = handed(packing_format="auto_round:llm_compressor", bits=4, group_size=64, sym=False)
    weights = grouped["config_groups"]["group_0"]["weights"]
    assert (weights["strategy"], weights["group_size"], weights["symmetric"]) == ("group", 64, False)
    assert grouped["config_groups"]["group_0"]["input_activations"] is None


def test_fp8_files_in_the_words_of_fp8() -> None:
    extra = {"model.layers.0.mlp.down_proj": {"bits": 16}, r".*mlp\.gate.*": {"bits": 16}}
    found = handed(packing_format="auto_round:fp8", data_type="fp", group_size=[128, 128], extra_config=extra)
    assert found == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.down_proj"],
        "weight_block_size": [128, 128],
    }


@pytest.mark.parametrize(
    "values",
    [
        {"data_type": "mx_fp"},
        {"data_type": "nv_fp"},
        {"act_bits": 8, "act_dynamic": False},
        {"act_bits": 8, "act_sym": False},
        {"act_bits": 4},
        {"act_bits": 8, "act_data_type": "fp"},
    ],
)
def test_llm_compressor_files_that_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        handed(packing_format="auto_round:llm_compressor", **values)


@pytest.mark.parametrize(
    ("packing", "method"), [("auto_round:llm_compressor", "compressed-tensors"), ("auto_round:fp8", "fp8")]
)
def test_the_registry_goes_on_with_the_other_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: str, method: str
) -> None:
    from halfbyte.checkpoints import registry

    seen: list[str] = []
    monkeypatch.setitem(registry.READERS, method, lambda folder: seen.append(folder.quantization.method))
    values = {"quant_method": "auto-round", "bits": 8, "group_size": -1, "packing_format": packing}
    folder = write_folder(tmp_path, llama_config(), float_tensors(llama_config()), values)
    (folder / "quantization_config.json").write_text(json.dumps(values))
    open_checkpoint(folder)
    assert seen == [method]


def test_fp8_blocks_are_read_as_fp8(data: Path, tmp_path: Path) -> None:
    """llmcompressor's blocks under the names that auto-round gives them."""
    source = data / "llama-ct-fp8-block"
    tensors = load_file(source / "model.safetensors")
    renamed = {name.replace("weight_scale", "weight_scale_inv"): value for name, value in tensors.items()}
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "auto-round",
        "packing_format": "auto_round:fp8",
        "data_type": "fp",
        "bits": 8,
        "group_size": [128, 128],
        "act_bits": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(renamed, tmp_path / "model.safetensors")
    ours, theirs = open_checkpoint(tmp_path), open_checkpoint(source)
    quantized = [name for name, info in theirs.layers.items() if info.scheme is not None]
    assert len(quantized) == 7
    for name in quantized:
        assert ours.layers[name].scheme == theirs.layers[name].scheme
        assert ours.layers[name].activations == theirs.layers[name].activations
        assert torch.equal(ours.quantized(name).dequantize(), theirs.quantized(name).dequantize())
