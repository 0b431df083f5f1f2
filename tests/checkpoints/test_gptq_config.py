"""What GPTQ configurations say about a layer."""

from __future__ import annotations

from typing import Any

import pytest

from halfbyte.checkpoints.gptq import gptq_config
from halfbyte.checkpoints.packed_config import PackedConfig
from halfbyte.checkpoints.quantization_config import QuantizationConfig
from halfbyte.errors import CheckpointError


def gptq(**values: Any) -> PackedConfig:
    return gptq_config(QuantizationConfig("gptq", {"bits": 4, "group_size": 128} | values, "config.json"))


def bits(config: PackedConfig, layer: str) -> int | None:
    setting = config.setting(layer)
    return None if setting is None else setting.bits


@pytest.mark.parametrize(
    ("values", "version"),
    [
        ({}, 1),
        ({"checkpoint_format": "gptq"}, 1),
        ({"checkpoint_format": "gptq_v2"}, 2),
        ({"format": "gptq_v2"}, 2),
        ({"format": "gptq_v2", "checkpoint_format": "gptq_v2"}, 2),
    ],
)
def test_version(values: dict[str, Any], version: int) -> None:
    assert gptq(**values).packings[0].storage == f"gptq v{version}"


@pytest.mark.parametrize(
    "values",
    [
        {"bits": "4"},
        {"bits": None},
        {"bits": True},
        {"bits": 0},
        {"bits": 4.0},
        {"group_size": "128"},
        {"group_size": -2},
        {"group_size": [128, 128]},
        {"sym": "yes"},
        {"desc_act": 1},
        {"checkpoint_format": "marlin"},
        {"checkpoint_format": 1},
        {"format": "gptq", "checkpoint_format": "gptq_v2"},
        {"is_marlin_format": True},
        {"pack_dtype": "int16"},
        {"dynamic": []},
        {"dynamic": {"a": 4}},
        {"modules_in_block_to_quantize": 4},
    ],
)
def test_values_that_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        gptq(**values)


@pytest.mark.parametrize("group_size", [-1, None, 0])
def test_one_group_per_row(group_size: int | None) -> None:
    setting = gptq(group_size=group_size).setting("model.layers.0.mlp.up_proj")
    assert setting is not None
    assert setting.group_size == -1


def test_dynamic_rules_in_order_and_from_the_start() -> None:
    """Case 64."""
    dynamic = {
        r"-:.*shared.*": {},
        r"+:.*layers\.1\..*": {"group_size": 64},
        r"layers\.2": {"bits": 8},
        r".*layers\.3.*": {"bits": 8},
        r".*": None,
    }
    config = gptq(dynamic=dynamic)
    assert config.setting("model.layers.1.shared.up_proj") is None
    one = config.setting("model.layers.1.mlp.up_proj")
    assert one is not None
    assert (one.bits, one.group_size) == (4, 64)
    assert bits(config, "model.layers.2.mlp.up_proj") == 4  # "layers.2" is not at the start
    assert bits(config, "model.layers.3.mlp.up_proj") == 8
    assert bits(config, "lm_head") == 4  # the last rule names it


def test_lm_head_is_float_unless_said() -> None:
    assert gptq().setting("lm_head") is None
    assert gptq(lm_head=True).setting("lm_head") is not None


def test_modules_in_block_to_quantize() -> None:
    config = gptq(modules_in_block_to_quantize=[["self_attn.q_proj"], ["mlp.up_proj"]])
    assert config.setting("model.layers.0.self_attn.q_proj") is not None
    assert config.setting("model.layers.0.self_attn.k_proj") is None
    assert config.setting("model.layers.0.mlp.up_proj") is not None
    assert config.setting("model.layers.0.mlp.up_proj_2") is None
    assert config.setting("lm_head") is None


def test_a_bad_override_names_its_rule() -> None:
    config = gptq(dynamic={"model.*": {"bits": "8"}})
    with pytest.raises(CheckpointError, match=r"rule 'model\.\*'"):
        config.setting("model.layers.0.mlp.up_proj")
