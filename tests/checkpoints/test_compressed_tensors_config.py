"""compressed-tensors configurations: which layer gets which group, and what cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_checkpoints import DOWN_PROJ, K_PROJ, Q_PROJ, float_tensors, llama_config, write_folder
from made_compressed_tensors import INT8, WEIGHTS, ct_folder, group, int_parts, packed_parts, signed_layer

from halfbyte.checkpoints import open_checkpoint
from halfbyte.checkpoints.compressed_tensors_config import (
    CompressedTensorsConfig,
    compressed_tensors_config,
)
from halfbyte.checkpoints.quantization_config import QuantizationConfig
from halfbyte.errors import CheckpointError

V_PROJ, GATE_PROJ = "model.layers.0.self_attn.v_proj", "model.layers.0.mlp.gate_proj"


def config(groups: dict[str, Any], **more: Any) -> CompressedTensorsConfig:
    values = {"config_groups": groups} | more
    return compressed_tensors_config(QuantizationConfig("compressed-tensors", values, "config.json"))


def chosen(found: CompressedTensorsConfig, layer: str) -> str | None:
    setting = found.setting(layer)
    return None if setting is None else setting.name


@pytest.mark.parametrize(
    ("ignore", "floats"),
    [
        ([], []),
        (["lm_head"], ["lm_head"]),
        ([Q_PROJ], [Q_PROJ]),
        (["re:.*self_attn.*"], [Q_PROJ, K_PROJ, V_PROJ]),
        (["re:self_attn"], []),  # expressions start at the start of the name
        (["re:model.*_proj$", "lm_head"], [Q_PROJ, K_PROJ, V_PROJ, GATE_PROJ, DOWN_PROJ, "lm_head"]),
        (["model.layers.0.self_attn.qkv_proj"], [Q_PROJ, K_PROJ, V_PROJ]),  # case 54: what engines fuse
        (["re:.*gate_up_proj"], [GATE_PROJ]),
        (["Linear"], [Q_PROJ, K_PROJ, V_PROJ, GATE_PROJ, DOWN_PROJ, "lm_head"]),
        (["Embedding"], []),
        (["model.layers.0.mlp.down"], []),  # case 61: no part of a name is its name
        (["model.layers.0.mlp.down_proj_2"], []),
    ],
)
def test_ignore(ignore: list[str], floats: list[str]) -> None:
    found = config({"all": group(["Linear"])}, ignore=ignore)
    names = [Q_PROJ, K_PROJ, V_PROJ, GATE_PROJ, DOWN_PROJ, "lm_head"]
    assert [name for name in names if found.setting(name) is None] == floats


def test_ignored_experts_of_one_layer() -> None:
    """Case 56."""
    found = config({"all": group(["Linear"])}, ignore=["re:.*layers.0.mlp.experts.*"])
    for layer in (0, 1):
        name = f"model.layers.{layer}.mlp.experts.3.up_proj"
        assert (found.setting(name) is None) == (layer == 0)


def test_a_name_goes_before_an_expression_and_that_before_a_class() -> None:
    found = config(
        {
            "class": group(["Linear"]),
            "expression": group(["re:.*self_attn.*"]),
            "name": group([Q_PROJ, "model.layers.0.mlp.gate_up_proj"]),
            "late": group(["re:.*k_proj"]),
        }
    )
    assert chosen(found, Q_PROJ) == "name"
    assert chosen(found, K_PROJ) == "expression"
    assert chosen(found, GATE_PROJ) == "name"
    assert chosen(found, DOWN_PROJ) == "class"


@pytest.mark.parametrize("target", ["Linear", "linear", "Module", "re:.*"])
def test_targets_of_all_layers(target: str) -> None:
    assert chosen(config({"all": group([target])}), DOWN_PROJ) == "all"


@pytest.mark.parametrize("target", ["Conv2d", "LlamaMLP", "Embedding", "re:q_proj"])
def test_targets_of_no_layer(target: str) -> None:
    assert chosen(config({"all": group([target])}), Q_PROJ) is None


def test_a_group_without_weights_leaves_them_alone() -> None:
    found = config({"inputs": {"targets": ["Linear"], "weights": None, "input_activations": INT8}})
    assert found.setting(Q_PROJ) is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_bits": "4"}, "num_bits"),
        ({"num_bits": 0}, "num_bits"),
        ({"num_bits": True}, "num_bits"),
        ({"type": "posit"}, "type"),
        ({"symmetric": "yes"}, "symmetric"),
        ({"strategy": "rows"}, "strategy"),
        ({"strategy": 3}, "strategy"),
        ({"group_size": 0}, "group_size"),
        ({"group_size": 2.0}, "group_size"),
        ({"group_size": None}, "group_size"),
        ({"strategy": "block"}, "block_structure"),
        ({"strategy": "block", "block_structure": [128]}, "block_structure"),
        ({"strategy": "block", "block_structure": [0, 128]}, "block_structure"),
        ({"strategy": "block", "block_structure": "128"}, "block_structure"),
        ({"dynamic": "sometimes"}, "dynamic"),
        ({"actorder": "up"}, "actorder"),
        ({"actorder": [1]}, "actorder"),
    ],
)
def test_impossible_arguments(change: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text) as error:
        config({"group_0": group(["Linear"], WEIGHTS | change)})
    assert "group_0" in str(error.value)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"config_groups": {}}, "config_groups"),
        ({"config_groups": None}, "config_groups"),
        ({"config_groups": ["Linear"]}, "config_groups"),
        ({"config_groups": {"a": 3}}, "no object"),
        ({"config_groups": {"a": group(["Linear"], format="marlin-24")}}, "marlin-24"),
        ({"config_groups": {"a": {"targets": "Linear", "weights": WEIGHTS}}}, "targets"),
        ({"config_groups": {"a": {"targets": [3], "weights": WEIGHTS}}}, "targets"),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": 4}}}, "weights"),
        ({"format": "marlin-24"}, "marlin-24"),
        ({"format": 3}, "format"),
        ({"ignore": "lm_head"}, "ignore"),
        ({"ignore": [3]}, "ignore"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ({"sparsity_config": 3}, "sparsity_config"),
    ],
)
def test_configurations_that_are_refused(values: dict[str, Any], text: str) -> None:
    usual: dict[str, Any] = {"config_groups": {"group_0": group(["Linear"])}}
    with pytest.raises(CheckpointError, match=text):
        compressed_tensors_config(QuantizationConfig("compressed-tensors", usual | values, "config.json"))


def test_a_pattern_that_is_none() -> None:
    found = config({"all": group(["re:(("])})
    with pytest.raises(CheckpointError, match="cannot be used"):
        found.setting(Q_PROJ)


def transform(*places: object) -> dict[str, Any]:
    return {"config_groups": {"u": {"type": "hadamard", "apply": [{"location": place} for place in places]}}}


@pytest.mark.parametrize("place", ["input", "output", "q_attn", "k_cache", None, 4])
def test_rotations_of_activations_are_refused(place: object) -> None:
    with pytest.raises(CheckpointError, match="transform"):
        config({"a": group(["Linear"])}, transform_config=transform("weight_input", place))
    config({"a": group(["Linear"])}, transform_config=transform("weight_input", "weight_output"))


@pytest.mark.parametrize("broken", [3, [3], {"config_groups": 3}, {"config_groups": {"a": {"apply": 3}}}])
def test_transforms_that_make_no_sense_are_refused(broken: object) -> None:
    with pytest.raises(CheckpointError, match="transform"):
        config({"a": group(["Linear"])}, transform_config=broken)


def test_quantized_caches_are_noted() -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    (note,) = config({"a": group(["Linear"])}, kv_cache_scheme=scheme).notes
    assert "caches" in note


def parts() -> dict[str, np.ndarray]:
    codes, _, scales = signed_layer((64, 96), 3)
    return packed_parts(DOWN_PROJ, codes, None, scales)


def test_scales_of_caches_are_no_unknown_tensors(tmp_path: Path) -> None:
    made = parts() | {"model.layers.0.self_attn.k_scale": np.ones(1, np.float32)}
    made |= {"model.layers.0.self_attn.v_scale": np.ones(1, np.float32)}
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    folder = ct_folder(tmp_path, llama_config(), made, [group([DOWN_PROJ])], kv_cache_scheme=scheme)
    warnings = open_checkpoint(folder).warnings
    assert len(warnings) == 2 and all("caches" in warning for warning in warnings)


def test_tensors_decide_what_is_quantized(tmp_path: Path) -> None:
    """Case 60: what has no quantized tensors is float, also where nothing ignores it."""
    folder = ct_folder(tmp_path / "a", llama_config(), parts(), [group(["Linear"])])
    checkpoint = open_checkpoint(folder)
    assert [name for name, layer in checkpoint.layers.items() if layer.scheme] == [DOWN_PROJ]
    (warning,) = checkpoint.warnings
    assert "the tensors are float" in warning and Q_PROJ in warning and DOWN_PROJ not in warning
    folder = ct_folder(tmp_path / "b", llama_config(), parts(), [group(["Linear"])], ignore=["re:.*"])
    checkpoint = open_checkpoint(folder)
    assert checkpoint.layers[DOWN_PROJ].scheme is not None
    (warning,) = checkpoint.warnings
    assert "the tensors are quantized" in warning and DOWN_PROJ in warning


def test_tensors_decide_the_storage(tmp_path: Path) -> None:
    folder = ct_folder(tmp_path, llama_config(), parts(), [group([DOWN_PROJ])], format="int-quantized")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.layers[DOWN_PROJ].storage == "ct packed"
    (warning,) = checkpoint.warnings
    assert "int-quantized" in warning and "packed" in warning


def test_tensors_decide_the_width(tmp_path: Path) -> None:
    one = group([DOWN_PROJ], WEIGHTS | {"num_bits": 8})
    checkpoint = open_checkpoint(ct_folder(tmp_path, llama_config(), parts(), [one]))
    assert checkpoint.quantized(DOWN_PROJ).scheme.width == "4"
    (warning,) = checkpoint.warnings
    assert "num_bits = 8" in warning and "4-bit" in warning


def test_a_layer_with_neither_tensor(tmp_path: Path) -> None:
    tensors = float_tensors(llama_config())
    del tensors[f"{K_PROJ}.weight"]
    said = {"quant_method": "compressed-tensors", "config_groups": {"a": group(["Linear"])}}
    with pytest.raises(CheckpointError, match=f"{K_PROJ}.weight_packed is missing"):
        open_checkpoint(write_folder(tmp_path, llama_config(), tensors, said))


def test_the_older_place_of_the_configuration(tmp_path: Path) -> None:
    """Case 69."""
    folder = ct_folder(tmp_path, llama_config(), parts(), [group([DOWN_PROJ])])
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"quantization_config"', '"compression_config"'))
    assert open_checkpoint(folder).layers[DOWN_PROJ].scheme is not None


@pytest.mark.parametrize("format", ["pack-quantized", "naive-quantized", "mixed-precision", None])
def test_formats_that_say_how_layers_are_stored_or_leave_it_open(tmp_path: Path, format: str | None) -> None:
    folder = ct_folder(tmp_path, llama_config(), parts(), [group([DOWN_PROJ])], format=format)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.warnings == []
    assert checkpoint.format == f"compressed-tensors {format}" if format else "compressed-tensors"


@pytest.mark.parametrize("format", ["int-quantized", "naive-quantized"])
def test_formats_of_bytes(tmp_path: Path, format: str) -> None:
    codes, zeros, scales = signed_layer((64, 96), 3)
    one = group([DOWN_PROJ], WEIGHTS | {"symmetric": False})
    made = int_parts(DOWN_PROJ, codes, zeros, scales)
    checkpoint = open_checkpoint(ct_folder(tmp_path, llama_config(), made, [one], format=format))
    assert checkpoint.warnings == [] and checkpoint.layers[DOWN_PROJ].storage == "ct int"
