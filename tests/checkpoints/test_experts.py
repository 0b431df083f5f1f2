"""Models with experts: their files are listed layer by layer and read exactly; they are not compiled yet."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from independent_unpack import load_json, read_safetensors
from made_checkpoints import float_tensors, llama_config, write_folder

import halfbyte
from halfbyte.checkpoints import open_checkpoint
from halfbyte.checkpoints.experts import names_in_file
from halfbyte.errors import CheckpointError

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
    assert "have experts" in warnings[0]
    if name == "deepseek-w4afp8":
        assert "static input scales" in warnings[1] and len(warnings) == 2
    else:
        assert len(warnings) == 1


@pytest.mark.parametrize("name", NAMES)
def test_compile_refuses_with_one_message(data: Path, tmp_path: Path, name: str) -> None:
    family = load_json(data / name / "config.json")["model_type"]
    with pytest.raises(CheckpointError, match="models with experts are not compiled yet") as error:
        halfbyte.compile(data / name, tmp_path / "out")
    assert family in str(error.value) and "halfbyte inspect" in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", NAMES)
def test_inspect_groups_experts(data: Path, name: str) -> None:
    found = halfbyte.inspect(data / name)
    experts = [group for group in found.groups if ".experts." in group.pattern]
    assert len(experts) == 3
    assert all(group.count % 4 == 0 and group.pattern.count("*") == 2 for group in experts)
    assert all(layer.plan.startswith("refused: a model with experts") for layer in found.layers)


def test_names_of_mixtral() -> None:
    both = names_in_file(["model.layers.0.block_sparse_moe.experts.0.w1.weight"])
    assert both("model.layers.1.mlp.experts.3.up_proj") == "model.layers.1.block_sparse_moe.experts.3.w3"
    assert both("model.layers.1.mlp.gate") == "model.layers.1.block_sparse_moe.gate"
    block = names_in_file(["model.layers.0.block_sparse_moe.experts.0.gate_proj.weight_packed"])
    assert (
        block("model.layers.1.mlp.experts.3.up_proj") == "model.layers.1.block_sparse_moe.experts.3.up_proj"
    )
    scales = names_in_file(["model.layers.0.mlp.experts.0.w1.input_scale"])
    assert scales("model.layers.1.mlp.experts.3.up_proj") == "model.layers.1.mlp.experts.3.up_proj"


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
