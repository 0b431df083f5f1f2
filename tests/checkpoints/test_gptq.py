"""GPTQ layers made by hand: zero points, groups, activation order, widths, rules, contradictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_checkpoints import (
    DOWN_PROJ,
    K_PROJ,
    Q_PROJ,
    dequantized,
    float_tensors,
    gptq_parts,
    linear_shapes,
    llama_config,
    pack,
    packed_folder,
    random_layer,
    write_folder,
)

from halfbyte.checkpoints import Checkpoint, open_checkpoint
from halfbyte.errors import CheckpointError
from halfbyte.passes.scheme import Zero


def opened(
    folder: Path, parts: dict[str, np.ndarray], config: dict[str, Any] | None = None, **said: Any
) -> Checkpoint:
    """A llama with the given GPTQ layers; the configuration leaves the others in float."""
    names = {key.rpartition(".")[0] for key in parts if key.endswith((".qweight", ".scales"))}
    floats = {f"-:{name}": {} for name in linear_shapes(config or llama_config()) if name not in names}
    dynamic = said.pop("dynamic", {}) | floats
    return open_checkpoint(packed_folder(folder, config or llama_config(), parts, dynamic=dynamic, **said))


def test_the_worked_example(tmp_path: Path) -> None:
    """formats: u[n, k] = (3n + 5k) mod 16, N = K = 8, groups of 4."""
    config = llama_config(
        hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=2, head_dim=4
    )
    words = "3e94fa50 61c72d83 94fa50b6 c72d83e9 fa50b61c 2d83e94f 50b61c72 83e94fa5"
    parts = {
        f"{Q_PROJ}.qweight": np.array([[int(word, 16) for word in words.split()]], np.uint32).view(np.int32),
        f"{Q_PROJ}.scales": np.array([[0.5] * 8, [0.25] * 8], np.float16),
    }
    for version, zeros in (("gptq", (0x77777777, 0xA9876543)), ("gptq_v2", (0x88888888, 0xBA987654))):
        qzeros = np.array(zeros, np.uint32).view(np.int32).reshape(2, 1)
        checkpoint = opened(
            tmp_path / version,
            parts | {f"{Q_PROJ}.qzeros": qzeros},
            config,
            group_size=4,
            checkpoint_format=version,
            sym=False,
        )
        refusal = checkpoint.layers[Q_PROJ].refusal
        assert refusal is not None
        assert refusal.layer == Q_PROJ
        assert "group_size = 4" in refusal.found
        assert "multiple of 8" in refusal.accepted
        weight = checkpoint.float_tensor(f"{Q_PROJ}.weight")
        assert weight[0].tolist() == [-4, -1.5, 1, 3.5, 0, 1.25, 2.5, -0.25]
        assert weight[1].tolist() == [-2.5, 0, 2.5, -3, 0.5, 1.75, -1, 0.25]
        assert weight[7].tolist() == [-1.5, 1, 3.5, -2, -0.5, 0.75, -2, -0.75]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "wide", "layer", "group_size", "groups"),
    [
        (2, 16, 96, Q_PROJ, 32, 2),
        (2, 20, 96, K_PROJ, 64, 1),  # N = 40
        (1, 20, 96, K_PROJ, 16, 4),  # N = 20: the last word of zero points is half used
        (2, 16, 96, DOWN_PROJ, 64, 2),  # K = 96: 64 and 32 inputs
        (2, 16, 132, DOWN_PROJ, 32, 5),  # K = 132: 4 inputs in the last group, the last word is half used
        (2, 16, 132, DOWN_PROJ, -1, 1),
        (2, 16, 96, DOWN_PROJ, -1, 1),
        (2, 16, 96, DOWN_PROJ, 1024, 1),
        (2, 16, 96, DOWN_PROJ, 24, 4),
    ],
)
@pytest.mark.parametrize("with_g_idx", [False, True])
def test_shapes_and_groups(
    tmp_path: Path,
    version: int,
    kv_heads: int,
    head_dim: int,
    wide: int,
    layer: str,
    group_size: int,
    groups: int,
    with_g_idx: bool,
) -> None:
    config = llama_config(num_key_value_heads=kv_heads, head_dim=head_dim, intermediate_size=wide)
    shape = linear_shapes(config)[layer]
    codes, zeros, scales = random_layer(shape, groups)
    group = np.zeros(shape[1], int) if groups == 1 else np.arange(shape[1]) // group_size
    parts = gptq_parts(layer, codes, zeros, scales, version=version, g_idx=group if with_g_idx else None)
    form = {1: "gptq", 2: "gptq_v2"}[version]
    checkpoint = opened(tmp_path, parts, config, group_size=group_size, checkpoint_format=form, sym=False)
    info, weight = checkpoint.layers[layer], checkpoint.quantized(layer)
    assert checkpoint.warnings == []
    assert info.shape == shape
    assert info.scheme == weight.scheme
    assert info.scheme is not None
    assert info.scheme.zero is Zero.INTEGER
    assert info.scheme.channelwise == (groups == 1)
    assert info.scheme.group_size == (shape[1] if groups == 1 else group_size)
    assert checkpoint.permutation(layer) is None
    np.testing.assert_array_equal(weight.codes.numpy(), codes)
    assert weight.zero is not None
    np.testing.assert_array_equal(weight.zero.numpy(), zeros)
    np.testing.assert_array_equal(weight.dequantize().numpy(), dequantized(codes, zeros, scales, group))


def test_zero_points_of_version_1_borrow_across_fields(tmp_path: Path) -> None:
    codes, zeros, scales = random_layer((64, 64), 1)
    zeros[:8, 0] = [0, 15, 8, 0, 0, 0, 0, 0]
    parts = gptq_parts(Q_PROJ, codes, zeros, scales)
    assert parts[f"{Q_PROJ}.qzeros"].view(np.uint32)[0, 0] == 0xEEEEF7DF
    weight = opened(tmp_path, parts, group_size=-1, sym=False).quantized(Q_PROJ)
    assert weight.zero is not None
    assert weight.zero[:8, 0].tolist() == [0, 15, 8, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("version", [1, 2])
def test_a_symmetric_layer_stores_no_zero_points(tmp_path: Path, version: int) -> None:
    codes, zeros, scales = random_layer((64, 64), 2)
    parts = gptq_parts(Q_PROJ, codes, np.full_like(zeros, 8), scales, version=version)
    assert set(parts[f"{Q_PROJ}.qzeros"].view(np.uint32).flat) == {0x77777777 if version == 1 else 0x88888888}
    checkpoint = opened(tmp_path, parts, checkpoint_format={1: "gptq", 2: "gptq_v2"}[version], sym=True)
    scheme, weight = checkpoint.layers[Q_PROJ].scheme, checkpoint.quantized(Q_PROJ)
    assert scheme is not None
    assert scheme.zero is Zero.SYMMETRIC
    assert weight.zero is None
    assert (weight.dequantize()[weight.codes == 8] == 0).all()


def test_zero_points_decide_against_sym(tmp_path: Path) -> None:
    codes, zeros, scales = random_layer((64, 64), 2)
    checkpoint = opened(tmp_path, gptq_parts(Q_PROJ, codes, zeros, scales), sym=True)
    scheme = checkpoint.layers[Q_PROJ].scheme
    assert scheme is not None
    assert scheme.zero is Zero.INTEGER
    (warning,) = checkpoint.warnings
    assert "sym" in warning
    assert Q_PROJ in warning


@pytest.mark.parametrize(("label", "version"), [("gptq", 2), ("gptq_v2", 1)])
def test_symmetric_zero_points_stored_the_other_way_are_refused(
    tmp_path: Path, label: str, version: int
) -> None:
    """Case 11."""
    codes, zeros, scales = random_layer((64, 64), 2)
    parts = gptq_parts(Q_PROJ, codes, np.full_like(zeros, 8), scales, version=version)
    with pytest.raises(CheckpointError, match=r"qzeros.*stored as in version") as error:
        opened(tmp_path, parts, checkpoint_format=label, sym=True)
    assert "checkpoint_format" in str(error.value)


def test_activation_order_becomes_a_permutation(tmp_path: Path) -> None:
    codes, zeros, scales = random_layer((64, 96), 3)
    group = np.random.default_rng(5).permutation(np.arange(96) // 32)
    parts = gptq_parts(DOWN_PROJ, codes, zeros, scales, g_idx=group)
    checkpoint = opened(tmp_path, parts, desc_act=True, sym=False)
    info, weight, order = (
        checkpoint.layers[DOWN_PROJ],
        checkpoint.quantized(DOWN_PROJ),
        checkpoint.permutation(DOWN_PROJ),
    )
    assert info.scheme is not None
    assert info.scheme.act_order
    assert order is not None
    assert order.dtype == torch.int64
    assert torch.equal(order, torch.from_numpy(np.argsort(group, kind="stable")))
    wanted = dequantized(codes, zeros, scales, group)
    np.testing.assert_array_equal(weight.dequantize().numpy(), wanted)
    np.testing.assert_array_equal(weight.codes.numpy(), codes[:, order.numpy()])
    assert checkpoint.warnings == []


def test_activation_order_with_a_ragged_last_group(tmp_path: Path) -> None:
    codes, zeros, scales = random_layer((64, 96), 2)
    group = np.random.default_rng(6).permutation(np.arange(96) // 64)
    parts = gptq_parts(DOWN_PROJ, codes, zeros, scales, g_idx=group)
    checkpoint = opened(tmp_path, parts, group_size=64, desc_act=True, sym=False)
    wanted = dequantized(codes, zeros, scales, group)
    np.testing.assert_array_equal(checkpoint.quantized(DOWN_PROJ).dequantize().numpy(), wanted)


def test_activation_order_without_g_idx_is_refused(tmp_path: Path) -> None:
    parts = gptq_parts(DOWN_PROJ, *random_layer((64, 96), 3))
    with pytest.raises(CheckpointError, match="g_idx") as error:
        opened(tmp_path, parts, desc_act=True)
    assert DOWN_PROJ in str(error.value)


def test_groups_of_unequal_size_are_refused_and_can_be_dequantized(tmp_path: Path) -> None:
    codes, zeros, scales = random_layer((64, 96), 3)
    group = np.repeat([0, 1, 2], [40, 16, 40])
    checkpoint = opened(tmp_path, gptq_parts(DOWN_PROJ, codes, zeros, scales, g_idx=group), sym=False)
    info = checkpoint.layers[DOWN_PROJ]
    assert info.scheme is None
    assert info.refusal is not None
    assert "unequal" in info.refusal.found
    weight = checkpoint.float_tensor(f"{DOWN_PROJ}.weight")
    np.testing.assert_array_equal(weight.numpy(), dequantized(codes, zeros, scales, group))


def test_group_size_20_is_refused_and_can_be_dequantized(tmp_path: Path) -> None:
    codes, zeros, scales = random_layer((64, 96), 5)
    checkpoint = opened(tmp_path, gptq_parts(DOWN_PROJ, codes, zeros, scales), group_size=20, sym=False)
    info = checkpoint.layers[DOWN_PROJ]
    assert info.refusal is not None
    assert "20" in info.refusal.found
    weight = checkpoint.float_tensor(f"{DOWN_PROJ}.weight")
    np.testing.assert_array_equal(weight.numpy(), dequantized(codes, zeros, scales, np.arange(96) // 20))


def test_g_idx_decides_against_group_size(tmp_path: Path) -> None:
    codes, zeros, scales = random_layer((64, 96), 3)
    group = np.arange(96) // 32
    checkpoint = opened(
        tmp_path, gptq_parts(DOWN_PROJ, codes, zeros, scales, g_idx=group), group_size=64, sym=False
    )
    scheme = checkpoint.layers[DOWN_PROJ].scheme
    assert scheme is not None
    assert scheme.group_size == 32
    assert any("group_size = 64" in text and "32" in text for text in checkpoint.warnings)


def test_a_number_of_groups_that_does_not_follow_is_refused(tmp_path: Path) -> None:
    """192 inputs in 2 groups could be 96 and 96 or 128 and 64: never derived from the number of rows."""
    config = llama_config(intermediate_size=192)
    parts = gptq_parts(DOWN_PROJ, *random_layer((64, 192), 2))
    with pytest.raises(CheckpointError, match="scales") as error:
        opened(tmp_path, parts, config, group_size=64)
    assert "3 = ceil(192 / 64)" in str(error.value)


@pytest.mark.parametrize("version", [1, 2])
def test_8_bit_layers_are_int8(tmp_path: Path, version: int) -> None:
    codes, zeros, scales = random_layer((64, 96), 3, bits=8)
    zeros[0, 0], zeros[1, 0] = 0, 255
    parts = gptq_parts(DOWN_PROJ, codes, zeros, scales, version=version, bits=8)
    form = {1: "gptq", 2: "gptq_v2"}[version]
    rules = {f"+:{DOWN_PROJ}": {"bits": 8}}
    checkpoint = opened(tmp_path, parts, dynamic=rules, checkpoint_format=form, sym=False)
    info = checkpoint.layers[DOWN_PROJ]
    assert info.refusal is None
    assert info.scheme is not None
    assert (info.scheme.bits, info.scheme.group_size, info.scheme.zero) == (8, 32, Zero.INTEGER)
    weight = checkpoint.quantized(DOWN_PROJ).dequantize()
    np.testing.assert_array_equal(weight.numpy(), dequantized(codes, zeros, scales, np.arange(96) // 32))
    assert checkpoint.warnings == []


def test_tensors_decide_against_bits(tmp_path: Path) -> None:
    codes, zeros, scales = random_layer((64, 96), 3, bits=8)
    checkpoint = opened(tmp_path, gptq_parts(DOWN_PROJ, codes, zeros, scales, bits=8), sym=False)
    assert checkpoint.layers[DOWN_PROJ].storage == "gptq v1, 8 bits"
    assert any("bits = 4" in text and "8-bit" in text and DOWN_PROJ in text for text in checkpoint.warnings)


@pytest.mark.parametrize("bits", [2, 3])
def test_other_widths_are_refused_by_layer(tmp_path: Path, bits: int) -> None:
    parts = {
        f"{DOWN_PROJ}.qweight": np.zeros((96 * bits // 32, 64), np.int32),
        f"{DOWN_PROJ}.qzeros": np.zeros((3, 64 * bits // 32), np.int32),
        f"{DOWN_PROJ}.scales": np.ones((3, 64), np.float16),
    }
    checkpoint = opened(tmp_path, parts, bits=bits)
    refusal = checkpoint.layers[DOWN_PROJ].refusal
    assert refusal is not None
    assert refusal.layer == DOWN_PROJ
    assert f"bits = {bits}" in refusal.found
    assert f"{DOWN_PROJ}.weight" not in checkpoint.floats


def test_the_first_dynamic_rule_counts(tmp_path: Path) -> None:
    codes, zeros, scales = random_layer((64, 96), 2)
    rules = {r".*mlp\.down_proj": {"group_size": 48}, r"+:.*": {"group_size": 16}}
    checkpoint = opened(tmp_path, gptq_parts(DOWN_PROJ, codes, zeros, scales), dynamic=rules, sym=False)
    scheme = checkpoint.layers[DOWN_PROJ].scheme
    assert scheme is not None
    assert scheme.group_size == 48


def test_a_float_layer_the_configuration_quantizes_gives_a_warning(tmp_path: Path) -> None:
    parts = gptq_parts(Q_PROJ, *random_layer((64, 64), 2))
    checkpoint = open_checkpoint(packed_folder(tmp_path, llama_config(), parts, sym=False))
    assert checkpoint.layers[K_PROJ].storage == "float f16"
    (warning,) = checkpoint.warnings
    assert K_PROJ in warning
    assert "float" in warning


def test_a_quantized_layer_the_configuration_leaves_out_gives_a_warning(tmp_path: Path) -> None:
    parts = gptq_parts(Q_PROJ, *random_layer((64, 64), 2))
    checkpoint = opened(tmp_path, parts, dynamic={"-:.*": {}}, sym=False)
    assert checkpoint.layers[Q_PROJ].scheme is not None
    assert any(Q_PROJ in text and "leaves" in text for text in checkpoint.warnings)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scales_that_are_no_numbers(tmp_path: Path, value: float) -> None:
    codes, zeros, scales = random_layer((64, 64), 2)
    scales[3, 1] = value
    checkpoint = opened(tmp_path, gptq_parts(Q_PROJ, codes, zeros, scales), sym=False)
    with pytest.raises(CheckpointError) as error:
        checkpoint.quantized(Q_PROJ)
    assert f"{Q_PROJ}.scales" in str(error.value)


@pytest.mark.parametrize(
    ("part", "value", "text"),
    [
        ("qweight", np.zeros((7, 64), np.int32), r"int32 \[7, 64\]"),
        ("qweight", np.zeros((8, 64), np.int16), r"int16 \[8, 64\]"),
        ("qzeros", np.zeros((2, 7), np.int32), r"int32 \[2, 8\]"),
        ("scales", np.zeros((2, 63), np.float16), r"\[2, 64\]"),
        ("scales", np.zeros((2, 64), np.float64), "float64"),
        ("scales", np.zeros((128,), np.float16), r"\[128\]"),
        ("g_idx", np.zeros(63, np.int32), r"\[64\]"),
        ("g_idx", np.full(64, 2, np.int32), "2 to 2"),
        ("g_idx", np.full(64, -1, np.int32), "-1 to -1"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, part: str, value: np.ndarray, text: str) -> None:
    parts = gptq_parts(Q_PROJ, *random_layer((64, 64), 2), g_idx=np.arange(64) // 32)
    with pytest.raises(CheckpointError, match=text) as error:
        opened(tmp_path, parts | {f"{Q_PROJ}.{part}": value}, sym=False)
    assert f"{Q_PROJ}.{part}" in str(error.value)


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales"])
def test_missing_parts_are_named(tmp_path: Path, part: str) -> None:
    parts = gptq_parts(Q_PROJ, *random_layer((64, 64), 2))
    config = llama_config()
    folder = packed_folder(tmp_path, config, parts)
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{Q_PROJ}.{part}"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(folder)
    assert f"{Q_PROJ}.{part}" in str(error.value)


def test_an_empty_g_idx_counts_as_none(tmp_path: Path) -> None:
    parts = gptq_parts(Q_PROJ, *random_layer((64, 64), 2), g_idx=np.zeros(0))
    assert opened(tmp_path, parts, sym=False).quantized(Q_PROJ).permutation is None


def test_float_and_quantized_at_once_is_refused(tmp_path: Path) -> None:
    parts = gptq_parts(Q_PROJ, *random_layer((64, 64), 2))
    folder = packed_folder(tmp_path, llama_config(), parts)
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors") | {f"{Q_PROJ}.weight": np.zeros((64, 64), np.float16)}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="which counts"):
        open_checkpoint(folder)


def test_zero_biases_of_a_model_without_are_dropped_others_refused(tmp_path: Path) -> None:
    parts = gptq_parts(Q_PROJ, *random_layer((64, 64), 2))
    bias = np.zeros(64, np.float16)
    checkpoint = opened(tmp_path / "zero", parts | {f"{Q_PROJ}.bias": bias}, sym=False)
    assert not checkpoint.layers[Q_PROJ].bias
    assert checkpoint.warnings == []
    with pytest.raises(CheckpointError, match="bias"):
        opened(tmp_path / "other", parts | {f"{Q_PROJ}.bias": bias + 1}, sym=False)


def test_the_files_of_older_versions(tmp_path: Path) -> None:
    """AutoGPTQ's quantize_config.json without quant_method, and its name of the weights."""
    codes, zeros, scales = random_layer((64, 64), 2)
    parts = gptq_parts(Q_PROJ, codes, zeros, scales, g_idx=np.arange(64) // 32)
    tensors = float_tensors(llama_config()) | parts
    del tensors[f"{Q_PROJ}.weight"]
    folder = write_folder(tmp_path, llama_config(), tensors)
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-32g.safetensors")
    old = {
        "bits": 4,
        "group_size": 32,
        "damp_percent": 0.01,
        "desc_act": False,
        "static_groups": False,
        "sym": False,
        "true_sequential": True,
        "model_name_or_path": None,
        "model_file_base_name": "gptq_model-4bit-32g",
        "modules_in_block_to_quantize": [["self_attn.q_proj"]],
    }
    (folder / "quantize_config.json").write_text(json.dumps(old))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.format == "gptq v1"
    assert checkpoint.warnings == []
    wanted = dequantized(codes, zeros, scales, np.arange(64) // 32)
    np.testing.assert_array_equal(checkpoint.quantized(Q_PROJ).dequantize().numpy(), wanted)


def test_packing_for_these_tests() -> None:
    assert pack(np.arange(8)[None]).view(np.uint32).tolist() == [[0x76543210]]
