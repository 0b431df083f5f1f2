"""Checkpoints written by gptqmodel, auto-round and gguf: schemes, weights and logits as expected."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from independent_unpack import (
    awq_layer,
    gguf_weight,
    gptq_layer,
    load_json,
    read_safetensors,
    rotary_back,
)

from halfbyte.checkpoints import Checkpoint, build_model, load_float_model, open_checkpoint
from halfbyte.passes.scheme import Zero

GPTQ = [
    "llama-gptq-v1-sym-g64",
    "llama-gptq-v2-asym-g32",
    "qwen2-gptq-v1-actorder-g32",
    "qwen3-gptq-dynamic",
    "llama-autogptq-channelwise",
    "llama-autoround-gptq-sym-g32",
    "llama-autoround-mixed-bits",
    "llama-autoround-zeros-as-stored",
    "base-gptq",
]
AWQ = ["qwen2-awq-asym-g32", "qwen3-autoround-awq-asym-g64"]
OTHERS = ["llama-torchao-int4-asym-g32", "llama-hqq-int4-g32", "llama-ct-nvfp4", "llama-ct-mxfp4"]
MIXED = ["llama-torchao-classes"]  # integers beside e4m3
GGUF = ["llama-gguf-q4_0", "llama-gguf-q4_1"]


def weight_of(checkpoint: Checkpoint, layer: str) -> np.ndarray:
    if layer not in checkpoint.layers or checkpoint.layers[layer].scheme is None:
        return checkpoint.float_tensor(f"{layer}.weight").numpy()
    return checkpoint.quantized(layer).dequantize().numpy()


@pytest.mark.parametrize("name", GPTQ + AWQ + OTHERS + GGUF)
def test_layers_have_the_schemes_they_were_written_with(data: Path, name: str) -> None:
    checkpoint = open_checkpoint(data / name)
    expected = load_json(data / name / "expected.json")
    quantized = {}
    for group in expected["quantized"]:
        for layer, about in group["layers"].items():
            quantized[layer] = group
            info = checkpoint.layers[layer]
            assert info.shape == tuple(about["shape"])
            assert info.storage.startswith(group["storage"].replace("-", " "))
            assert info.refusal is None
            assert info.scheme is not None
            assert info.scheme.levels.kind(info.scheme.bits) == group["weight"]
            channelwise = group["group_size"] == -1
            assert info.scheme.group_size == (info.shape[1] if channelwise else group["group_size"])
            assert info.scheme.channelwise == channelwise
            assert (info.scheme.zero is Zero.SYMMETRIC) == group["symmetric"]
            assert info.scheme.act_order == group["act_order"]
            assert info.scheme.scale_dtype == group["scale_dtype"].lower()
    floats = {layer for layer, info in checkpoint.layers.items() if layer not in quantized}
    assert floats == {layer for layer in expected["unquantized"] if layer != "model.embed_tokens"}
    assert all(checkpoint.layers[layer].scheme is None for layer in floats)
    assert checkpoint.warnings == []


@pytest.mark.parametrize("name", GPTQ + AWQ + OTHERS + MIXED + GGUF)
def test_dequantized_weights_are_exact(data: Path, name: str) -> None:
    checkpoint = open_checkpoint(data / name)
    expected = read_safetensors(data / name / "expected.safetensors")
    layers = [key.removeprefix("dequant:") for key in expected if key.startswith("dequant:")]
    assert layers
    for layer in layers:
        np.testing.assert_array_equal(weight_of(checkpoint, layer), expected[f"dequant:{layer}"])


@pytest.mark.parametrize("name", GPTQ + AWQ)
def test_every_packed_layer_equals_the_independent_unpacker(data: Path, name: str) -> None:
    checkpoint = open_checkpoint(data / name)
    tensors = read_safetensors(data / name / "model.safetensors")
    config = load_json(data / name / "config.json")["quantization_config"]
    as_stored = (
        "gptq_v2" in config.get("checkpoint_format", "") or config.get("packing_format") == "auto_round"
    )
    version = 2 if as_stored else 1
    layers = [key.removesuffix(".qweight") for key in tensors if key.endswith(".qweight")]
    assert layers
    for layer in layers:
        info = checkpoint.layers[layer]
        codes, zeros, scales, weight = (
            awq_layer(tensors, layer, outputs=info.shape[0], group_size=config["group_size"])
            if name in AWQ
            else gptq_layer(
                tensors, layer, inputs=info.shape[1], version=version, group_size=config["group_size"]
            )
        )
        np.testing.assert_array_equal(weight_of(checkpoint, layer), weight)
        if info.scheme is None:
            continue
        found = checkpoint.quantized(layer)
        assert found.scheme == info.scheme
        order = np.arange(info.shape[1]) if found.permutation is None else found.permutation.numpy()
        np.testing.assert_array_equal(found.codes.numpy(), codes[:, order])
        np.testing.assert_array_equal(found.scale.float().numpy(), scales)
        np.testing.assert_array_equal(
            np.full_like(zeros, 2 ** (info.scheme.bits - 1)) if found.zero is None else found.zero.numpy(),
            zeros,
        )
    for layer, info in checkpoint.layers.items():
        if layer not in layers:
            values = checkpoint.float_tensor(f"{layer}.weight")
            np.testing.assert_array_equal(values.float().numpy(), tensors[f"{layer}.weight"])
            assert info.storage == f"float {'f16' if values.dtype == torch.float16 else 'bf16'}"


@pytest.mark.parametrize("name", GGUF)
def test_every_gguf_layer_equals_the_independent_unpacker(data: Path, name: str) -> None:
    checkpoint = open_checkpoint(data / name)
    heads = {"q": checkpoint.config["num_attention_heads"], "k": checkpoint.config["num_key_value_heads"]}
    short = {"output": "o_proj", "q": "q_proj", "k": "k_proj", "v": "v_proj"}
    compared = 0
    for tensor in GGUFReader(data / name / "model.gguf").tensors:
        kind, shape = tensor.tensor_type.name, tuple(int(part) for part in reversed(tensor.shape))
        if not kind.startswith("Q"):
            continue
        weight = gguf_weight(tensor.data.tobytes(), kind, shape)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            group, leaf = parts[2].split("_")
            ours = f"self_attn.{short[leaf]}" if group == "attn" else f"mlp.{leaf}_proj"
            weight = rotary_back(weight, heads[leaf]) if leaf in heads else weight
            np.testing.assert_array_equal(weight_of(checkpoint, f"model.layers.{parts[1]}.{ours}"), weight)
        else:
            ours = {"token_embd": "model.embed_tokens", "output": "lm_head"}[parts[0]]
            np.testing.assert_array_equal(weight_of(checkpoint, ours), weight)
        compared += 1
    assert compared >= 14


@pytest.mark.parametrize("name", GPTQ + AWQ + OTHERS + MIXED + GGUF)
def test_logits_of_the_float_model(data: Path, name: str) -> None:
    checkpoint = open_checkpoint(data / name)
    expected = read_safetensors(data / name / "expected.safetensors")
    tokens = torch.tensor(expected["tokens"])[None]
    with torch.no_grad():
        logits = load_float_model(checkpoint)(tokens).logits[0].numpy()
    assert np.abs(logits - expected["logits"]).max() <= 2e-4 * np.abs(expected["logits"]).max()


@pytest.mark.parametrize(
    "name", [*AWQ, *OTHERS, "qwen2-gptq-v1-actorder-g32", "llama-gptq-v2-asym-g32", "llama-gguf-q4_1"]
)
def test_logits_of_the_model_with_quantized_modules(data: Path, name: str) -> None:
    checkpoint = open_checkpoint(data / name)
    expected = read_safetensors(data / name / "expected.safetensors")
    model = build_model(checkpoint)
    for table in checkpoint.tables:
        model.get_submodule(table).fill(checkpoint.quantized(table))
    for parameter, value in model.named_parameters():
        if parameter.rpartition(".")[0] not in checkpoint.tables:
            value.copy_(checkpoint.float_tensor(parameter))
    for layer, info in checkpoint.layers.items():
        if info.scheme is not None:
            bias = checkpoint.float_tensor(f"{layer}.bias") if info.bias else None
            model.get_submodule(layer).fill(checkpoint.quantized(layer), bias)
    with torch.no_grad():
        logits = model(torch.tensor(expected["tokens"])[None]).logits[0].numpy()
    assert np.abs(logits - expected["logits"]).max() <= 2e-4 * np.abs(expected["logits"]).max()


def test_a_gguf_file_opens_like_its_folder(data: Path) -> None:
    folder, file = open_checkpoint(data / GGUF[0]), open_checkpoint(data / GGUF[0] / "model.gguf")
    assert folder.config == file.config
    assert folder.layers == file.layers
    assert folder.path == data / GGUF[0]
    assert file.path == data / GGUF[0] / "model.gguf"


@pytest.mark.skipif("HALFBYTE_GGUF" not in os.environ, reason="HALFBYTE_GGUF names a real GGUF file to read")
def test_a_real_gguf_file_equals_transformers_reading_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf
    from transformers import AutoModelForCausalLM

    # transformers asks for the same map of names again for every module of the model.
    monkeypatch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
    file = Path(os.environ["HALFBYTE_GGUF"])
    ours = load_float_model(open_checkpoint(file))
    theirs = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    wanted = dict(theirs.named_parameters(remove_duplicate=False))
    for name, value in ours.named_parameters():
        assert torch.equal(value, wanted[name]), name


@pytest.mark.parametrize("name", GPTQ + AWQ + OTHERS + MIXED + GGUF)
def test_a_glance_tells_the_same(data: Path, name: str) -> None:
    whole, glance = open_checkpoint(data / name), open_checkpoint(data / name, glance=True)
    assert (whole.layers, whole.warnings, whole.floats) == (glance.layers, glance.warnings, glance.floats)
