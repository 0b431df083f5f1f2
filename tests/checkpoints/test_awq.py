"""AWQ layers made by hand: the order of columns, zero points, names that stay in float, other versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_checkpoints import (
    DOWN_PROJ,
    K_PROJ,
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

from halfbyte.checkpoints import Checkpoint, open_checkpoint
from halfbyte.checkpoints.awq import awq_config
from halfbyte.checkpoints.quantization_config import QuantizationConfig
from halfbyte.errors import CheckpointError
from halfbyte.passes.scheme import Zero


def opened(
    folder: Path, parts: dict[str, np.ndarray], config: dict[str, Any] | None = None, **said: Any
) -> Checkpoint:
    """A llama with the given AWQ layers; the configuration leaves the others in float."""
    config = config or llama_config()
    floats = [name for name in linear_shapes(config) if f"{name}.qweight" not in parts]
    skipped = {"modules_to_not_convert": floats, "quant_method": "awq", "zero_point": True}
    return open_checkpoint(packed_folder(folder, config, parts, **skipped | said))


def test_the_worked_example(tmp_path: Path) -> None:
    """formats: u[n, k] = (3n + 5k) mod 16, N = K = 8, groups of 4."""
    config = llama_config(
        hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=2, head_dim=4
    )
    words = "5f932c60 a4e871b5 f93dc60a 4e821b5f 93d760a4 e82cb5f9 3d710a4e 82c65f93"
    parts = {
        "qweight": np.array([[int(word, 16)] for word in words.split()], np.uint32).view(np.int32),
        "qzeros": np.array([[0x88888888], [0xB975A864]], np.uint32).view(np.int32),
        "scales": np.array([[0.5] * 8, [0.25] * 8], np.float16),
    }
    named = {f"{Q_PROJ}.{part}": value for part, value in parts.items()}
    weight = opened(tmp_path, named, config, group_size=4).float_tensor(f"{Q_PROJ}.weight")
    assert weight[0].tolist() == [-4, -1.5, 1, 3.5, 0, 1.25, 2.5, -0.25]
    assert weight[1].tolist() == [-2.5, 0, 2.5, -3, 0.5, 1.75, -1, 0.25]
    assert weight[7].tolist() == [-1.5, 1, 3.5, -2, -0.5, 0.75, -2, -0.75]


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "wide", "layer", "group_size", "groups"),
    [
        (2, 16, 96, Q_PROJ, 32, 2),
        (2, 20, 96, K_PROJ, 64, 1),  # N = 40
        (1, 20, 96, K_PROJ, 16, 4),  # N = 20: the last word of a row is half used
        (2, 16, 96, DOWN_PROJ, 64, 2),  # K = 96: 64 and 32 inputs
        (2, 16, 132, DOWN_PROJ, 32, 5),  # K = 132: the last group has 4 inputs
        (2, 16, 132, DOWN_PROJ, -1, 1),
        (2, 16, 96, DOWN_PROJ, 1024, 1),
    ],
)
def test_shapes_and_groups(
    tmp_path: Path, kv_heads: int, head_dim: int, wide: int, layer: str, group_size: int, groups: int
) -> None:
    config = llama_config(num_key_value_heads=kv_heads, head_dim=head_dim, intermediate_size=wide)
    shape = linear_shapes(config)[layer]
    codes, zeros, scales = random_layer(shape, groups)
    checkpoint = opened(tmp_path, awq_parts(layer, codes, zeros, scales), config, group_size=group_size)
    info, weight = checkpoint.layers[layer], checkpoint.quantized(layer)
    assert checkpoint.warnings == []
    assert info.storage == "awq"
    assert info.scheme == weight.scheme
    assert info.scheme is not None
    assert info.scheme.zero is Zero.INTEGER
    assert info.scheme.channelwise == (groups == 1)
    np.testing.assert_array_equal(weight.codes.numpy(), codes)
    assert weight.zero is not None
    np.testing.assert_array_equal(weight.zero.numpy(), zeros)
    group = np.zeros(shape[1], int) if groups == 1 else np.arange(shape[1]) // group_size
    np.testing.assert_array_equal(weight.dequantize().numpy(), dequantized(codes, zeros, scales, group))


def test_zero_points_are_put_in_the_same_order_as_weights(tmp_path: Path) -> None:
    """Case 3: zero points that all differ; a constant one would not show a wrong order."""
    codes, _, scales = random_layer((64, 64), 2)
    zeros = np.stack([np.arange(64) % 16, 15 - np.arange(64) % 16], 1)
    weight = opened(tmp_path, awq_parts(Q_PROJ, codes, zeros, scales)).quantized(Q_PROJ)
    wanted = dequantized(codes, zeros, scales, np.arange(64) // 32)
    np.testing.assert_array_equal(weight.dequantize().numpy(), wanted)


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("said", [{"zero_point": False}, {"zero_point": None, "sym": True}])
def test_symmetric_layers_with_and_without_zero_points(
    tmp_path: Path, stored: bool, said: dict[str, Any]
) -> None:
    codes, zeros, scales = random_layer((64, 64), 2)
    parts = awq_parts(Q_PROJ, codes, np.full_like(zeros, 8) if stored else None, scales)
    if stored:
        assert set(parts[f"{Q_PROJ}.qzeros"].view(np.uint32).flat) == {0x88888888}
    checkpoint = opened(tmp_path, parts, **said)
    scheme, weight = checkpoint.layers[Q_PROJ].scheme, checkpoint.quantized(Q_PROJ)
    assert scheme is not None
    assert scheme.zero is Zero.SYMMETRIC
    assert weight.zero is None
    assert (weight.scale < 0).any()
    wanted = dequantized(codes, np.full_like(zeros, 8), scales, np.arange(64) // 32)
    np.testing.assert_array_equal(weight.dequantize().numpy(), wanted)
    assert checkpoint.warnings == []


def test_missing_zero_points_of_an_asymmetric_layer(tmp_path: Path) -> None:
    codes, _, scales = random_layer((64, 64), 2)
    with pytest.raises(CheckpointError, match=f"{Q_PROJ}.qzeros is missing"):
        opened(tmp_path, awq_parts(Q_PROJ, codes, None, scales))


def test_zero_points_decide_against_the_configuration(tmp_path: Path) -> None:
    codes, zeros, scales = random_layer((64, 64), 2)
    checkpoint = opened(tmp_path, awq_parts(Q_PROJ, codes, zeros, scales), zero_point=False)
    assert checkpoint.quantized(Q_PROJ).zero is not None
    (warning,) = checkpoint.warnings
    assert "sym" in warning and Q_PROJ in warning


def test_symmetric_zero_points_stored_less_one_are_refused(tmp_path: Path) -> None:
    codes, zeros, scales = random_layer((64, 64), 2)
    parts = awq_parts(Q_PROJ, codes, np.full_like(zeros, 7), scales)
    with pytest.raises(CheckpointError, match=r"qzeros.*stored as in version 1 of GPTQ"):
        opened(tmp_path, parts, zero_point=False)


@pytest.mark.parametrize("version", [1, 2])
def test_tensors_packed_as_gptq_are_refused(tmp_path: Path, version: int) -> None:
    """Their zero points could be either version's, so nothing is assumed."""
    parts = gptq_parts(Q_PROJ, *random_layer((64, 64), 2), version=version)
    with pytest.raises(CheckpointError, match=f"{Q_PROJ}.qweight") as error:
        opened(tmp_path, parts)
    assert "int32 [8, 64]" in str(error.value)
    assert "int32 [64, 8]" in str(error.value)


def test_tensors_packed_as_awq_under_a_gptq_configuration(tmp_path: Path) -> None:
    codes, zeros, scales = random_layer((64, 64), 2)
    said = {"quant_method": "gptq", "dynamic": {f"-:(?!{Q_PROJ})": {}}, "modules_to_not_convert": None}
    checkpoint = opened(tmp_path, awq_parts(Q_PROJ, codes, zeros, scales), **said)
    assert checkpoint.layers[Q_PROJ].storage == "awq"
    wanted = dequantized(codes, zeros, scales, np.arange(64) // 32)
    np.testing.assert_array_equal(checkpoint.quantized(Q_PROJ).dequantize().numpy(), wanted)
    (warning,) = checkpoint.warnings
    assert "gptq v1" in warning and "awq" in warning and Q_PROJ in warning


@pytest.mark.parametrize("bits", [3, 8])
def test_other_widths_are_refused_by_layer(tmp_path: Path, bits: int) -> None:
    parts = {
        f"{DOWN_PROJ}.qweight": np.zeros((96, 64 * bits // 32), np.int32),
        f"{DOWN_PROJ}.qzeros": np.zeros((3, 64 * bits // 32), np.int32),
        f"{DOWN_PROJ}.scales": np.ones((3, 64), np.float16),
    }
    checkpoint = opened(tmp_path, parts, bits=bits)
    refusal = checkpoint.layers[DOWN_PROJ].refusal
    assert refusal is not None
    assert (refusal.layer, refusal.found, refusal.accepted) == (DOWN_PROJ, f"bits = {bits}", "bits = 4")
    assert f"{DOWN_PROJ}.weight" not in checkpoint.floats


@pytest.mark.parametrize(
    ("part", "value", "text"),
    [
        ("qweight", np.zeros((64, 7), np.int32), r"int32 \[64, 7\]"),
        ("qweight", np.zeros((64, 8), np.int16), r"int16 \[64, 8\]"),
        ("qzeros", np.zeros((2, 7), np.int32), r"int32 \[2, 8\]"),
        ("qzeros", np.zeros((1, 8), np.int32), r"int32 \[2, 8\]"),
        ("scales", np.zeros((2, 63), np.float16), r"\[2, 64\]"),
        ("scales", np.zeros((3, 64), np.float16), r"2 = ceil\(64 / 32\)"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, part: str, value: np.ndarray, text: str) -> None:
    parts = awq_parts(Q_PROJ, *random_layer((64, 64), 2))
    with pytest.raises(CheckpointError, match=text) as error:
        opened(tmp_path, parts | {f"{Q_PROJ}.{part}": value})
    assert f"{Q_PROJ}.{part}" in str(error.value)


def test_the_file_of_older_versions(tmp_path: Path) -> None:
    codes, zeros, scales = random_layer((64, 64), 2)
    parts = awq_parts(Q_PROJ, codes, zeros, scales)
    tensors = float_tensors(llama_config()) | parts
    del tensors[f"{Q_PROJ}.weight"]
    folder = write_folder(tmp_path, llama_config(), tensors)
    old = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (folder / "quant_config.json").write_text(json.dumps(old))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.format == "awq gemm"
    wanted = dequantized(codes, zeros, scales, np.arange(64) // 32)
    np.testing.assert_array_equal(checkpoint.quantized(Q_PROJ).dequantize().numpy(), wanted)
    (warning,) = checkpoint.warnings  # nothing there says that the others stay in float
    assert "quant_config.json quantizes these layers, the tensors are float" in warning


def setting_of(layer: str, **values: Any) -> object:
    config = awq_config(QuantizationConfig("awq", {"bits": 4, "group_size": 128} | values, "config.json"))
    return config.setting(layer)


@pytest.mark.parametrize(
    ("name", "layer", "skipped"),
    [
        ("model.layers.5.mlp.down_proj", "model.layers.5.mlp.down_proj", True),
        ("model.layers.5.mlp.down_proj", "model.layers.50.mlp.down_proj", False),
        ("model.layers.5", "model.layers.5.mlp.down_proj", True),
        ("layers.5.", "model.layers.5.mlp.down_proj", True),
        ("model.layers.5", "model.layers.50.mlp.down_proj", False),
        ("mlp.down_proj", "model.layers.7.mlp.down_proj", True),
        ("mlp", "model.layers.7.mlp.down_proj", True),
        ("gate", "model.layers.7.mlp.gate_proj", False),
        ("gate", "model.layers.7.mlp.gate", True),
        ("lm_head", "lm_head", True),
    ],
)
def test_names_match_at_dots(name: str, layer: str, skipped: bool) -> None:
    """Case 61."""
    assert (setting_of(layer, modules_to_not_convert=[name]) is None) == skipped


def test_nothing_is_skipped_but_the_head() -> None:
    for values in ({}, {"modules_to_not_convert": None}, {"modules_to_not_convert": []}):
        assert setting_of("model.layers.5.mlp.down_proj", **values) is not None
        assert setting_of("lm_head", **values) is None


@pytest.mark.parametrize(
    "values",
    [
        {"version": "gemv"},
        {"version": "gemv_fast"},
        {"version": "GEMV"},
        {"version": "exllama"},
        {"version": "marlin"},
        {"version": 2},
        {"format": "gemv"},
        {"backend": "llm-awq"},
        {"bits": None},
        {"bits": "4"},
        {"group_size": "32"},
        {"zero_point": "yes"},
        {"zero_point": True, "sym": True},
        {"modules_to_not_convert": 5},
        {"modules_to_not_convert": [5]},
    ],
)
def test_values_that_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        setting_of(Q_PROJ, **values)
