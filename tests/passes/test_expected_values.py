"""The operators on the layers of real checkpoints, against values that the checkpoints' makers computed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import halfbyte.passes.ops  # noqa: F401  registers torch.ops.halfbyte
from halfbyte.checkpoints import open_checkpoint

NAMES = (
    "llama-gptq-v1-sym-g64",
    "llama-gptq-v2-asym-g32",
    "qwen2-gptq-v1-actorder-g32",
    "qwen3-gptq-dynamic",
    "llama-autogptq-channelwise",
    "llama-autoround-gptq-sym-g32",
    "llama-autoround-mixed-bits",
    "qwen2-awq-asym-g32",
    "qwen3-autoround-awq-asym-g64",
    "llama-gguf-q4_0",
    "llama-gguf-q4_1",
    "base-ct-w4a8",
    "llama-ct-w4a16-g128",
    "llama-ct-w4a8-int-quantized",
    "llama-ct-w4a8-packed-g32",
    "llama-ct-w4afp8",
    "qwen2-ct-w4a16-asym-sharded",
    "qwen3-ct-w4a8-channel",
)
FP8 = ("llama-ct-fp8-block", "qwen3-ct-fp8-dynamic")


def four_bit_layers(folder: Path, values: dict[str, np.ndarray]) -> list[str]:
    groups = json.loads((folder / "expected.json").read_text())["quantized"]
    narrow = {name for group in groups if group["weight"] == "int4" for name in group["layers"]}
    with_values = {key.split(":")[1] for key in values if key.endswith(":y_float")}
    return sorted(narrow & with_values)


@pytest.mark.parametrize("name", NAMES)
def test_layers_give_the_expected_outputs(checkpoints: Path, name: str) -> None:
    folder = checkpoints / name
    values, checkpoint = load_file(folder / "expected.safetensors"), open_checkpoint(folder)
    layers = four_bit_layers(folder, values)
    assert layers
    for layer in layers:
        weight = checkpoint.quantized(layer)
        bias = checkpoint.float_tensor(f"{layer}.bias").float() if checkpoint.layers[layer].bias else None
        expected = {kind: values[f"linear:{layer}:{kind}"] for kind in ("x", "y_float", "y_int8")}
        x = torch.from_numpy(expected["x"])
        if weight.permutation is not None:
            x = x[:, weight.permutation]
        parts = (
            x,
            weight.packed(),
            weight.scale,
            weight.zero,
            weight.minimum,
            bias,
            weight.bits,
            weight.group_size,
        )
        largest = np.abs(expected["y_float"]).max(1, keepdims=True)
        got = torch.ops.halfbyte.linear(*parts, "none", 3, 0).numpy()
        assert (np.abs(got - expected["y_float"]) <= 2e-6 * largest).all()
        got = torch.ops.halfbyte.linear(*parts, "none", 2, 0).numpy()
        # Row 4 holds columns of outliers, beside which two digits leave the others few bits.
        limit = np.full((7, 1), 1e-4)
        limit[4] = 1e-3
        assert (np.abs(got - expected["y_float"]) <= limit * largest).all()
        got = torch.ops.halfbyte.linear(*parts, "int8", 3, 0).numpy()
        if weight.minimum is None:
            np.testing.assert_array_equal(got, expected["y_int8"])
        else:
            assert (np.abs(got - expected["y_int8"]) <= 1e-5 * largest).all()
        assert not np.array_equal(got, expected["y_float"])
        if (wanted := values.get(f"linear:{layer}:y_fp8")) is not None:
            got = torch.ops.halfbyte.linear(*parts, "fp8", 3, 0).numpy()
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("name", FP8)
def test_e4m3_layers_give_the_expected_outputs(checkpoints: Path, name: str) -> None:
    values, checkpoint = (
        load_file(checkpoints / name / "expected.safetensors"),
        open_checkpoint(checkpoints / name),
    )
    layers = [key.split(":")[1] for key in values if key.endswith(":y_fp8")]
    assert layers
    for layer in layers:
        weight, x = checkpoint.quantized(layer), torch.from_numpy(values[f"linear:{layer}:x"])
        parts = (x, weight.bits, weight.scale, None, weight.block_outputs, weight.block_inputs)
        for mode, kind, limit in (("none", "y_float", 2e-6), ("fp8", "y_fp8", 1e-5)):
            got, wanted = (
                torch.ops.halfbyte.fp8_block_linear(*parts, mode).numpy(),
                values[f"linear:{layer}:{kind}"],
            )
            largest = np.abs(wanted).max(1, keepdims=True)
            assert (np.abs(got - wanted) <= limit * largest).all(), (layer, kind)
        assert not np.array_equal(values[f"linear:{layer}:y_float"], values[f"linear:{layer}:y_fp8"])


@pytest.mark.parametrize("name", NAMES)
def test_quantized_activations_are_the_expected_ones(checkpoints: Path, name: str) -> None:
    values = load_file(checkpoints / name / "expected.safetensors")
    layers = [key.split(":")[1] for key in values if key.endswith(":q_int8")]
    assert layers
    for layer in layers:
        codes, scale = torch.ops.halfbyte.quantize_per_token(torch.from_numpy(values[f"linear:{layer}:x"]))
        np.testing.assert_array_equal(codes.numpy(), values[f"linear:{layer}:q_int8"])
        np.testing.assert_array_equal(scale.numpy(), values[f"linear:{layer}:scale_int8"])
