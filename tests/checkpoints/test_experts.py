"""Models with experts: their files are listed layer by layer and read exactly; the experts of a block are one."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from independent_unpack import load_json, read_safetensors
from made_checkpoints import float_tensors, llama_config, write_folder
from made_compressed_tensors import signed_layer
from made_experts import Codes, made_model, quantize, write_experts

import halfbyte
from halfbyte.checkpoints import build_model, expert_layers, open_checkpoint
from halfbyte.checkpoints.architecture import meta_model
from halfbyte.checkpoints.names_in_file import NamesInFile
from halfbyte.errors import CheckpointError, UnsupportedLayerError
from halfbyte.passes.quant_experts import QuantExperts

NAMES = ["qwen3moe-ct-w4a8", "mixtral-ct-w4a16-sharded", "deepseek-w4afp8"]


@pytest.mark.parametrize("name", NAMES)
def test_layers_have_the_schemes_they_were_written_with(data: Path, name: str) -> None:
    checkpoint = open_checkpoint(data / name, glance=True)
    expected = load_json(data / name / "expected.json")
    assert checkpoint.format == expected["format"]
    quantized = set()
    for group in expected["quantized"]:
        for layer, about in group["layers"].items():
            info = checkpoint.layers[layer]
            quantized.add(layer)
            assert info.shape == tuple(about["shape"])
            assert info.storage == group["storage"].replace("-", " ")
            assert info.activations.value == group["activation"].removesuffix("-block")
            assert info.scheme is not None and info.scheme.scale_dtype == group["scale_dtype"].lower()
            size = group.get("group_size", -1)
            inputs = min(group["block"][1], info.shape[1]) if "block" in group else info.shape[1]
            assert info.scheme.group_size == (inputs if size == -1 else size)
    floats = {layer for layer in checkpoint.layers if layer not in quantized}
    assert floats == {layer for layer in expected["unquantized"] if layer != "model.embed_tokens"}
    assert any(layer.endswith(".gate") for layer in floats)  # routers


@pytest.mark.parametrize("name", NAMES)
def test_dequantized_weights_are_exact(data: Path, name: str) -> None:
    checkpoint = open_checkpoint(data / name, glance=True)
    expected = read_safetensors(data / name / "expected.safetensors")
    layers = [key.removeprefix("dequant:") for key in expected if key.startswith("dequant:")]
    assert any(".experts." in layer for layer in layers)
    for layer in layers:
        found = checkpoint.quantized(layer).dequantize().numpy()
        np.testing.assert_array_equal(found, expected[f"dequant:{layer}"])


@pytest.mark.parametrize("name", NAMES)
def test_warnings(data: Path, name: str) -> None:
    """Scales of inputs, under whatever name, are dropped with a note (case 28); nothing else is unknown."""
    warnings = open_checkpoint(data / name, glance=True).warnings
    if name == "deepseek-w4afp8":
        assert "static input scales" in warnings[0] and len(warnings) == 1
    else:
        assert not warnings


@pytest.mark.parametrize("name", NAMES)
def test_inspect_groups_experts(data: Path, name: str) -> None:
    found = halfbyte.inspect(data / name)
    experts = [group for group in found.groups if ".experts." in group.pattern]
    assert len(experts) == 3
    assert all(group.count % 4 == 0 and group.pattern.count("*") == 2 for group in experts)
    modes = {"qwen3moe-ct-w4a8": "W4A8", "mixtral-ct-w4a16-sharded": "W4A16", "deepseek-w4afp8": "W4AFP8"}
    plans = {layer.plan for layer in found.layers if ".experts." in layer.name}
    assert len(plans) == 1 and modes[name] in plans.pop()


@pytest.mark.parametrize("name", NAMES)
def test_inspect_counts_parameters(data: Path, name: str) -> None:
    found = halfbyte.inspect(data / name).parameters
    model = meta_model(open_checkpoint(data / name, glance=True).config)
    biases = [value for key, value in model.named_buffers() if key.endswith("e_score_correction_bias")]
    assert found.total == sum(value.numel() for value in [*model.parameters(), *biases])
    experts = [value for key, value in model.named_parameters() if ".experts." in key]
    unused = 1 - found.experts_per_token / found.experts
    assert found.active == found.total - unused * sum(value.numel() for value in experts)
    shape = (len(experts) // 2, experts[0].shape[0], model.config.num_experts_per_tok)
    assert (found.blocks, found.experts, found.experts_per_token) == shape


def test_dense_models_meet_all_parameters(data: Path) -> None:
    found = halfbyte.inspect(data / "base-gptq").parameters
    assert found.total == found.active and found.experts == 0
    assert str(found) == "63.7 thousand parameters"


@pytest.mark.parametrize("chosen", [0, 9, -1, 2.0, "2", True, None])
def test_impossible_numbers_of_experts_per_token(data: Path, tmp_path: Path, chosen: Any) -> None:
    source = data / "qwen3moe-ct-w4a8"
    config = json.loads((source / "config.json").read_text()) | {"num_experts_per_tok": chosen}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(source / "model.safetensors", tmp_path)
    with pytest.raises(CheckpointError, match="num_experts_per_tok is impossible"):
        open_checkpoint(tmp_path, glance=True)


def test_a_block_is_one_module(data: Path) -> None:
    checkpoint = open_checkpoint(data / "qwen3moe-ct-w4a8")
    model = build_model(checkpoint)
    found = [module for module in model.modules() if isinstance(module, QuantExperts)]
    assert len(found) == model.config.num_hidden_layers
    count = model.config.num_local_experts
    assert found[0].up_codes.shape[:2] == (count, 2 * model.config.moe_intermediate_size)
    assert all(buffer.is_meta for buffer in found[0].buffers())


def test_many_experts_that_differ_are_refused(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one they would all compute every token."""
    monkeypatch.setattr(expert_layers, "_MOST_SINGLE", 1)
    checkpoint = open_checkpoint(data / "qwen3moe-ct-w4a8")
    names = [f"model.layers.1.mlp.experts.{number}.up_proj" for number in (2, 5)]
    checkpoint.layers = dict(checkpoint.layers) | {
        name: replace(checkpoint.layers[name], scheme=None) for name in names
    }
    with pytest.raises(UnsupportedLayerError, match=r"model\.layers\.1\.mlp\.experts") as error:
        build_model(checkpoint)
    assert f"{names[0]}: float" in str(error.value) and "in at most 1 experts" in str(error.value)


def test_names_of_mixtral() -> None:
    both = NamesInFile.of(["model.layers.0.block_sparse_moe.experts.0.w1.weight"])
    assert both("model.layers.1.mlp.experts.3.up_proj") == "model.layers.1.block_sparse_moe.experts.3.w3"
    assert both("model.layers.1.mlp.gate") == "model.layers.1.block_sparse_moe.gate"
    block = NamesInFile.of(["model.layers.0.block_sparse_moe.experts.0.gate_proj.weight_packed"])
    assert (
        block("model.layers.1.mlp.experts.3.up_proj") == "model.layers.1.block_sparse_moe.experts.3.up_proj"
    )
    scales = NamesInFile.of(["model.layers.0.mlp.experts.0.w1.input_scale"])
    assert scales("model.layers.1.mlp.experts.3.up_proj") == "model.layers.1.mlp.experts.3.up_proj"


def test_routers_that_no_rule_spares_are_float(tmp_path: Path) -> None:
    """Case 60: every Linear is a target and nothing is ignored, but the router is float in the file."""

    def draw(name: str, shape: tuple[int, int], seed: int) -> Codes:
        codes, _, scales = signed_layer(shape, -(-shape[1] // 16), seed)
        return Codes(codes, None, scales, 16)

    made = made_model("qwen3_moe", decoder_sparse_step=1)
    quantize(made, lambda name: "_proj" in name, draw)
    folder = write_experts(tmp_path, made)
    config = json.loads((folder / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["targets"] = ["Linear"]
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.layers["model.layers.0.mlp.gate"].scheme is None
    for name, codes in made.codes.items():
        assert torch.equal(checkpoint.quantized(name).dequantize(), codes.dequantized())


@pytest.mark.parametrize("experts", [0, -1, 2**40, 1.5, "8", True])
def test_impossible_numbers_of_experts(tmp_path: Path, experts: Any) -> None:
    config = llama_config(model_type="qwen3_moe", num_experts=experts)
    folder = write_folder(tmp_path, config, float_tensors(llama_config()))
    with pytest.raises(CheckpointError, match="num_experts is impossible"):
        open_checkpoint(folder, glance=True)


def test_a_missing_expert_is_named(data: Path, tmp_path: Path) -> None:
    source = data / "qwen3moe-ct-w4a8"
    config = json.loads((source / "config.json").read_text())
    config["num_local_experts"] = 9
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(source / "model.safetensors", tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.experts\.8\.gate_proj"):
        open_checkpoint(tmp_path, glance=True)
