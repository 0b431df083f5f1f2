"""compressed-tensors files written by llmcompressor: schemes, activations, weights and logits as expected."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from independent_unpack import ct_layer, fp8_weight, load_json, read_folder, read_safetensors

from halfbyte.checkpoints import build_model, load_float_model, open_checkpoint
from halfbyte.checkpoints.checkpoint import LayerInfo
from halfbyte.passes.scheme import Activations, Fp8Scheme, WeightScheme, Zero
from halfbyte.passes.weight import Fp8Tensor, QuantTensor

INTEGER = [
    "base-ct-w4a8",
    "llama-ct-w4a16-g128",
    "llama-ct-w4a8-int-quantized",
    "llama-ct-w4a8-packed-g32",
    "llama-ct-w4afp8",
    "qwen2-ct-w4a16-asym-sharded",
    "qwen3-ct-w4a8-channel",
]
FP8 = ["llama-ct-fp8-block", "qwen3-ct-fp8-dynamic"]
MIXED = ["llama-ct-static-int8"]  # widths and storages


def check_integer(info: LayerInfo, group: dict) -> None:
    assert isinstance(info.scheme, WeightScheme)
    assert info.scheme.levels.kind(info.scheme.bits) == group["weight"]
    channelwise = group["group_size"] == -1
    assert info.scheme.group_size == (info.shape[1] if channelwise else group["group_size"])
    assert info.scheme.channelwise == channelwise
    assert (info.scheme.zero is Zero.SYMMETRIC) == group["symmetric"]
    assert info.scheme.act_order == group["act_order"]
    assert info.activations.value == group["activation"]


def check_fp8(info: LayerInfo, group: dict) -> None:
    assert isinstance(info.scheme, Fp8Scheme)
    outputs, inputs = group.get("block", [1, info.shape[1]])
    assert info.scheme.block_outputs == min(outputs, info.shape[0])
    assert info.scheme.block_inputs == min(inputs, info.shape[1])
    assert info.activations is Activations.FP8


@pytest.mark.parametrize("name", INTEGER + FP8 + MIXED)
def test_layers_have_the_schemes_they_were_written_with(data: Path, name: str) -> None:
    checkpoint, expected = open_checkpoint(data / name), load_json(data / name / "expected.json")
    assert checkpoint.format == expected["format"]
    quantized = set()
    for group in expected["quantized"]:
        for layer, about in group["layers"].items():
            info = checkpoint.layers[layer]
            quantized.add(layer)
            assert info.shape == tuple(about["shape"])
            assert info.storage == group["storage"].replace("-", " ")
            assert info.refusal is None and info.refused_activations is None
            assert info.scheme is not None
            assert info.scheme.scale_dtype == group["scale_dtype"].lower()
            (check_fp8 if group["weight"] == "fp8_e4m3" else check_integer)(info, group)
    floats = {layer for layer in checkpoint.layers if layer not in quantized}
    assert floats == {layer for layer in expected["unquantized"] if layer != "model.embed_tokens"}
    assert all(checkpoint.layers[layer].scheme is None for layer in floats)
    assert ["rounded as torchao" in text for text in checkpoint.warnings] == [True] * (name in MIXED)


@pytest.mark.parametrize("name", INTEGER + FP8 + MIXED)
def test_dequantized_weights_are_exact(data: Path, name: str) -> None:
    checkpoint = open_checkpoint(data / name)
    expected = read_safetensors(data / name / "expected.safetensors")
    layers = [key.removeprefix("dequant:") for key in expected if key.startswith("dequant:")]
    assert layers
    for layer in layers:
        weight = checkpoint.quantized(layer)
        assert weight.scheme == checkpoint.layers[layer].scheme
        np.testing.assert_array_equal(weight.dequantize().numpy(), expected[f"dequant:{layer}"])


@pytest.mark.parametrize("name", INTEGER)
def test_every_integer_layer_equals_the_independent_unpacker(data: Path, name: str) -> None:
    checkpoint, tensors = open_checkpoint(data / name), read_folder(data / name)
    [group] = load_json(data / name / "config.json")["quantization_config"]["config_groups"].values()
    compared = 0
    for layer, info in checkpoint.layers.items():
        if info.scheme is None:
            continue
        size = group["weights"]["group_size"] or info.shape[1]
        codes, zeros, scales, weight = ct_layer(tensors, layer, shape=info.shape, bits=4, group_size=size)
        found = checkpoint.quantized(layer)
        assert isinstance(found, QuantTensor)
        np.testing.assert_array_equal(found.codes.numpy() - 8.0, codes)
        np.testing.assert_array_equal(found.scale.float().numpy(), scales)
        ours = np.zeros_like(zeros) if found.zero is None else found.zero.numpy().astype(int) - 8
        np.testing.assert_array_equal(ours, zeros)
        np.testing.assert_array_equal(found.dequantize().numpy(), weight)
        compared += 1
    assert compared >= 7


@pytest.mark.parametrize("name", FP8)
def test_every_fp8_layer_equals_the_independent_unpacker(data: Path, name: str) -> None:
    checkpoint, tensors = open_checkpoint(data / name), read_folder(data / name)
    for layer, info in checkpoint.layers.items():
        bits, scale = tensors[f"{layer}.weight"], tensors[f"{layer}.weight_scale"]
        block = (128, 128) if "block" in name else (1, info.shape[1])
        found = checkpoint.quantized(layer)
        assert isinstance(found, Fp8Tensor)
        np.testing.assert_array_equal(found.bits.numpy(), bits)
        np.testing.assert_array_equal(found.dequantize().numpy(), fp8_weight(bits, scale, block))


@pytest.mark.parametrize("name", INTEGER + FP8 + MIXED)
def test_logits_of_the_float_model(data: Path, name: str) -> None:
    expected = read_safetensors(data / name / "expected.safetensors")
    tokens = torch.tensor(expected["tokens"])[None]
    with torch.no_grad():
        logits = load_float_model(open_checkpoint(data / name))(tokens).logits[0].numpy()
    assert np.abs(logits - expected["logits"]).max() <= 1e-4 * np.abs(expected["logits"]).max()


DYNAMIC = [*FP8, *MIXED, "base-ct-w4a8", "llama-ct-w4afp8"]


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [(name, True) for name in DYNAMIC]
    + [(name, False) for name in [*DYNAMIC, "qwen2-ct-w4a16-asym-sharded"]],
)
def test_logits_of_the_model_with_quantized_modules(data: Path, name: str, dynamic: bool) -> None:
    """Float activations everywhere, or those that the checkpoint asks for."""
    checkpoint = open_checkpoint(data / name)
    expected = read_safetensors(data / name / "expected.safetensors")
    asked = {} if dynamic else {"activations": lambda _: Activations.NONE}
    model = build_model(checkpoint, **asked)
    for parameter, value in model.named_parameters():
        value.copy_(checkpoint.float_tensor(parameter))
    for layer, info in checkpoint.layers.items():
        if info.scheme is not None:
            bias = checkpoint.float_tensor(f"{layer}.bias") if info.bias else None
            model.get_submodule(layer).fill(checkpoint.quantized(layer), bias)
    with torch.no_grad():
        logits = model(torch.tensor(expected["tokens"])[None]).logits[0].numpy()
    wanted = expected["logits_dynamic" if dynamic else "logits"]
    limit = 2e-2 if dynamic else 1e-4
    assert np.abs(logits - wanted).max() <= limit * np.abs(wanted).max()
    if dynamic:  # the activations really were quantized
        assert np.abs(logits - expected["logits"]).max() > 1e-3 * np.abs(wanted).max()
