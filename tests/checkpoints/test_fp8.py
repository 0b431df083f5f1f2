"""fp8 checkpoints: e4m3 weights with a scale per block or one for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from independent_unpack import fp8_weight
from made_checkpoints import DOWN_PROJ, K_PROJ, Q_PROJ, llama_config
from made_compressed_tensors import quantized_folder

from halfbyte.checkpoints import Checkpoint, open_checkpoint
from halfbyte.errors import CheckpointError
from halfbyte.passes.scheme import Activations, Fp8Scheme

BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [32, 40]}


def parts(
    name: str, shape: tuple[int, int], grid: tuple[int, ...], scale: str = "weight_scale_inv"
) -> dict[str, Any]:
    """Every finite bit pattern, and scales of which all differ."""
    random = np.random.default_rng(len(name))
    bits = random.integers(0, 256, shape).astype(np.uint8)
    bits[(bits & 127) == 127] = 0x3C
    scales = random.uniform(0.001, 0.1, grid).astype(np.float32)
    return {f"{name}.weight": torch.from_numpy(bits).view(torch.float8_e4m3fn), f"{name}.{scale}": scales}


def opened(folder: Path, made: dict[str, Any], **said: Any) -> Checkpoint:
    """Layers that are not made stay in float, as the configuration says."""
    names = {key.rpartition(".")[0] for key in made}
    others = [f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")]
    ignored = [part for part in others if not any(name.endswith(part) for name in names)]
    quantization = BLOCKS | {"modules_to_not_convert": ignored} | said
    return open_checkpoint(quantized_folder(folder, llama_config(), made, quantization))


def bits_of(made: dict[str, Any], name: str) -> np.ndarray:
    return made[f"{name}.weight"].view(torch.uint8).numpy()


def test_blocks(tmp_path: Path) -> None:
    """Partial blocks at both ends: 64 = 2 x 32 outputs, 96 = 2.4 x 40 inputs."""
    made = parts(DOWN_PROJ, (64, 96), (2, 3)) | parts(Q_PROJ, (64, 64), (2, 2))
    checkpoint = opened(tmp_path, made)
    assert checkpoint.format == "fp8" and checkpoint.warnings == []
    for name in (DOWN_PROJ, Q_PROJ):
        info = checkpoint.layers[name]
        assert info.scheme == Fp8Scheme(32, 40, "f32")
        assert info.storage == "fp8 block" and info.activations is Activations.FP8
        expected = fp8_weight(bits_of(made, name), made[f"{name}.weight_scale_inv"], (32, 40))
        np.testing.assert_array_equal(checkpoint.quantized(name).dequantize().numpy(), expected)
    assert checkpoint.layers[K_PROJ].scheme is None


def test_the_block_of_the_format_description(tmp_path: Path) -> None:
    """W = arange(16) - 8 with W[3, 3] = 100, as one block whose scale is 100 / 448."""
    octets = bytes.fromhex("e1e0dddb")
    bits = np.zeros((64, 64), np.uint8)
    bits[0, :4], bits[3, :4] = list(octets), [0x59, 0x5B, 0x5D, 0x7E]
    made = {
        f"{Q_PROJ}.weight": torch.from_numpy(bits).view(torch.float8_e4m3fn),
        f"{Q_PROJ}.weight_scale_inv": np.array([[100 / 448]], np.float32),
    }
    found = opened(tmp_path, made, weight_block_size=[128, 128]).quantized(Q_PROJ).dequantize().numpy()
    np.testing.assert_allclose(found[0, :4], [-8.0357, -7.1429, -5.8036, -4.9107], atol=1e-4)
    np.testing.assert_allclose(found[3, :4], [4.0179, 4.9107, 5.8036, 100], atol=1e-4)


@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("grid", [(), (1,), (1, 1)])
def test_one_scale(tmp_path: Path, scale: str, grid: tuple[int, ...]) -> None:
    made = parts(DOWN_PROJ, (64, 96), grid, scale)
    checkpoint = opened(tmp_path, made, weight_block_size=None)
    assert checkpoint.layers[DOWN_PROJ].scheme == Fp8Scheme(64, 96, "f32")
    assert checkpoint.warnings == []
    expected = fp8_weight(bits_of(made, DOWN_PROJ), made[f"{DOWN_PROJ}.{scale}"].reshape(1, 1), (64, 96))
    np.testing.assert_array_equal(checkpoint.quantized(DOWN_PROJ).dequantize().numpy(), expected)


def test_scales_that_are_not_those_of_the_configuration(tmp_path: Path) -> None:
    made = parts(DOWN_PROJ, (64, 96), (64, 1))
    checkpoint = opened(tmp_path / "a", made)
    (warning,) = checkpoint.warnings
    assert "block" in warning and "channel" in warning and DOWN_PROJ in warning
    assert checkpoint.layers[DOWN_PROJ].scheme == Fp8Scheme(1, 96, "f32")
    with pytest.raises(CheckpointError, match=r"\[2, 3\]") as error:
        opened(tmp_path / "b", parts(DOWN_PROJ, (64, 96), (3, 3)))
    assert f"{DOWN_PROJ}.weight_scale_inv" in str(error.value)


def test_scales_that_are_powers_of_two(tmp_path: Path) -> None:
    """F8_E8M0: a byte e means 2 ** (e - 127), and 255 is NaN."""
    made = parts(DOWN_PROJ, (64, 96), (2, 3))
    exponents = np.array([[0, 1, 127], [120, 130, 240]], np.uint8)
    made[f"{DOWN_PROJ}.weight_scale_inv"] = torch.from_numpy(exponents).view(torch.float8_e8m0fnu)
    checkpoint = opened(tmp_path / "a", made)
    assert checkpoint.layers[DOWN_PROJ].scheme == Fp8Scheme(32, 40, "f32") and checkpoint.warnings == []
    powers = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
    found = checkpoint.quantized(DOWN_PROJ)
    np.testing.assert_array_equal(found.scale.numpy(), powers)
    expected = fp8_weight(bits_of(made, DOWN_PROJ), powers, (32, 40))
    np.testing.assert_array_equal(found.dequantize().numpy(), expected)
    exponents[0, 1] = 255
    made[f"{DOWN_PROJ}.weight_scale_inv"] = torch.from_numpy(exponents).view(torch.float8_e8m0fnu)
    with pytest.raises(CheckpointError, match="no numbers"):
        opened(tmp_path / "b", made).quantized(DOWN_PROJ)


def test_static_scales_are_noted(tmp_path: Path) -> None:
    made = parts(DOWN_PROJ, (64, 96), (), "weight_scale") | {
        f"{DOWN_PROJ}.input_scale": np.ones(1, np.float32)
    }
    (warning,) = opened(tmp_path, made, weight_block_size=None, activation_scheme="static").warnings
    assert "static input scales" in warning and DOWN_PROJ in warning


def test_scales_that_are_rounded_elsewhere_are_noted(tmp_path: Path) -> None:
    (warning,) = opened(tmp_path, parts(DOWN_PROJ, (64, 96), (2, 3)), scale_fmt="ue8m0").warnings
    assert "ue8m0" in warning


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
def test_both_names_of_the_list_of_float_layers(tmp_path: Path, key: str) -> None:
    folder = quantized_folder(
        tmp_path, llama_config(), parts(DOWN_PROJ, (64, 96), (2, 3)),
        BLOCKS | {key: ["model.layers.0.self_attn", "model.layers.0.mlp.gate_proj", "up_proj"]},
    )  # fmt: skip
    assert open_checkpoint(folder).warnings == []


def test_a_layer_that_the_list_names_and_the_file_holds(tmp_path: Path) -> None:
    (warning,) = opened(
        tmp_path,
        parts(DOWN_PROJ, (64, 96), (2, 3)),
        modules_to_not_convert=["self_attn", "model.layers.0.self_attn", "model.layers.0.mlp"],
    ).warnings
    assert "leaves these layers in float" in warning and DOWN_PROJ in warning


def test_a_missing_scale_is_named(tmp_path: Path) -> None:
    """Case 28."""
    made = parts(DOWN_PROJ, (64, 96), (2, 3))
    del made[f"{DOWN_PROJ}.weight_scale_inv"]
    with pytest.raises(CheckpointError, match=f"{DOWN_PROJ}.weight_scale"):
        opened(tmp_path, made)


def test_two_scales_are_refused(tmp_path: Path) -> None:
    made = parts(DOWN_PROJ, (64, 96), (2, 3))
    made[f"{DOWN_PROJ}.weight_scale"] = made[f"{DOWN_PROJ}.weight_scale_inv"].copy()
    with pytest.raises(CheckpointError, match="nothing says which counts"):
        opened(tmp_path, made)


def test_a_weight_of_another_shape(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"\[64, 96\]"):
        opened(tmp_path, parts(DOWN_PROJ, (96, 64), (2, 3)))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"fmt": "e5m2"}, "fmt"),
        ({"activation_scheme": "none"}, "activation_scheme"),
        ({"weight_block_size": [128]}, "weight_block_size"),
        ({"weight_block_size": [128, 0]}, "weight_block_size"),
        ({"weight_block_size": 128}, "weight_block_size"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        ({"ignored_layers": [3]}, "ignored_layers"),
        ({"group_size": -1}, "group_size"),
    ],
)
def test_impossible_configurations(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        opened(tmp_path, parts(DOWN_PROJ, (64, 96), (2, 3)), **change)
