"""w4afp8 checkpoints: int4 codes two per byte beside e4m3 weights, in dense layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_checkpoints import DOWN_PROJ, Q_PROJ, llama_config
from made_compressed_tensors import quantized_folder, signed_layer, w4afp8_parts
from test_fp8 import parts as fp8_parts

from halfbyte.checkpoints import Checkpoint, open_checkpoint
from halfbyte.errors import CheckpointError
from halfbyte.passes.scheme import Activations, WeightScheme, Zero
from halfbyte.passes.weight import Fp8Tensor, QuantTensor

SAID = {
    "quant_method": "w4afp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "group_size": 128,
}
FLOATS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]


def opened(
    folder: Path, made: dict[str, Any], config: dict[str, Any] | None = None, **said: Any
) -> Checkpoint:
    quantization = SAID | {"ignored_layers": FLOATS} | said
    return open_checkpoint(quantized_folder(folder, config or llama_config(), made, quantization))


def test_int4_layers(tmp_path: Path) -> None:
    codes, _, scales = signed_layer((64, 416), 4)
    config = llama_config(intermediate_size=416)
    checkpoint = opened(tmp_path, w4afp8_parts(DOWN_PROJ, codes, scales), config)
    assert checkpoint.format == "w4afp8" and checkpoint.warnings == []
    layer = checkpoint.layers[DOWN_PROJ]
    assert layer.scheme == WeightScheme(128, False, Zero.SYMMETRIC, "f32")
    assert layer.activations is Activations.FP8 and layer.storage == "w4afp8"
    found = checkpoint.quantized(DOWN_PROJ)
    assert isinstance(found, QuantTensor)
    np.testing.assert_array_equal(found.codes.numpy() - 8.0, codes)
    expected = codes.astype(np.float32) * scales[:, np.arange(416) // 128]
    np.testing.assert_array_equal(found.dequantize().numpy(), expected)


def test_the_bytes_of_the_format_description(tmp_path: Path) -> None:
    codes, _, scales = signed_layer((64, 96), 1)
    made = w4afp8_parts(DOWN_PROJ, codes, scales)
    made[f"{DOWN_PROJ}.weight"][0, :4] = [-40, 114, 28, -74]  # d8 72 1c b6
    found = opened(tmp_path, made).quantized(DOWN_PROJ)
    assert [int(code) - 8 for code in found.codes[0, :8]] == [-8, -3, 2, 7, -4, 1, 6, -5]


def test_the_configuration_of_tensorrt_llm(tmp_path: Path) -> None:
    """hf_quant_config.json says MIXED_PRECISION and nothing else; the tensors tell."""
    codes, _, scales = signed_layer((64, 256), 2)
    made = w4afp8_parts(DOWN_PROJ, codes, scales) | fp8_parts(Q_PROJ, (64, 64), (1, 1))
    config = llama_config(intermediate_size=256)
    folder = quantized_folder(tmp_path, config, made, {})
    known = json.loads((folder / "config.json").read_text())
    known.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(known))
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "MIXED_PRECISION"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    checkpoint = open_checkpoint(folder)
    assert [text for text in checkpoint.warnings if "MIXED_PRECISION" in text and "1 layers" in text]
    found = checkpoint.quantized(DOWN_PROJ)
    assert isinstance(found, QuantTensor)
    np.testing.assert_array_equal(found.codes.numpy() - 8.0, codes)
    assert isinstance(checkpoint.quantized(Q_PROJ), Fp8Tensor)
    said["quantization"]["quant_algo"] = "FP8"
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match=r"FP8(.|\n)*accepted: NVFP4, or MIXED_PRECISION"):
        open_checkpoint(folder)


def test_e4m3_layers_beside_them(tmp_path: Path) -> None:
    codes, _, scales = signed_layer((64, 96), 1)
    made = w4afp8_parts(DOWN_PROJ, codes, scales) | fp8_parts(Q_PROJ, (64, 64), (1, 1))
    checkpoint = opened(tmp_path, made, ignored_layers=[name for name in FLOATS if name != "q_proj"])
    assert checkpoint.warnings == []
    assert checkpoint.layers[Q_PROJ].storage == "fp8 block"
    assert checkpoint.layers[Q_PROJ].activations is Activations.FP8


def test_scales_of_inputs_are_dropped_with_a_note(tmp_path: Path) -> None:
    """Case 28."""
    codes, _, scales = signed_layer((64, 96), 1)
    made = w4afp8_parts(DOWN_PROJ, codes, scales) | {f"{DOWN_PROJ}.input_scale": np.ones((), np.float32)}
    (warning,) = opened(tmp_path, made, activation_scheme="static").warnings
    assert "static input scales" in warning and DOWN_PROJ in warning


@pytest.mark.parametrize(
    ("part", "value", "text"),
    [
        ("weight", np.zeros((64, 96), np.int8), r"\[64, 48\]"),
        ("weight", np.zeros((64, 47), np.int8), r"\[64, 48\]"),
        ("weight_scale_inv", np.ones((64, 2), np.float32), r"\[64, 1\]"),
        ("weight_scale_inv", np.ones((64, 1), np.int32), r"\[64, 1\]"),
        ("weight_scale_inv", None, "is missing"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, part: str, value: np.ndarray | None, text: str) -> None:
    codes, _, scales = signed_layer((64, 96), 1)
    made = w4afp8_parts(DOWN_PROJ, codes, scales)
    made.pop(f"{DOWN_PROJ}.{part}")
    if value is not None:
        made[f"{DOWN_PROJ}.{part}"] = value
    with pytest.raises(CheckpointError, match=text) as error:
        opened(tmp_path, made)
    assert f"{DOWN_PROJ}.{part}" in str(error.value)


def test_nan_scales(tmp_path: Path) -> None:
    codes, _, scales = signed_layer((64, 96), 1)
    scales[5, 0] = np.nan
    with pytest.raises(CheckpointError, match=f"{DOWN_PROJ}.weight_scale_inv"):
        opened(tmp_path, w4afp8_parts(DOWN_PROJ, codes, scales)).quantized(DOWN_PROJ)


def test_a_layer_that_is_to_be_float(tmp_path: Path) -> None:
    codes, _, scales = signed_layer((64, 96), 1)
    (warning,) = opened(
        tmp_path, w4afp8_parts(DOWN_PROJ, codes, scales), ignored_layers=[*FLOATS, "model.layers.0"]
    ).warnings
    assert "the tensors are int4" in warning and DOWN_PROJ in warning
