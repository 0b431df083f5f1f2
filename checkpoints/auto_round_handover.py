"""AutoRound checkpoints whose tensors are laid out as another method's: their configuration in its words.

This is the one seam between AutoRound and the readers of compressed-tensors and fp8: the registry asks
`other_method` and goes on with the method that the answer names.
"""

from __future__ import annotations

from typing import Any

from halfbyte.checkpoints.config_values import accept, mapping, names
from halfbyte.checkpoints.packed_config import FLOAT_BITS, layer_setting
from halfbyte.checkpoints.quantization_config import QuantizationConfig

_TO_COMPRESSED_TENSORS = "auto_round:llm_compressor"
_TO_FP8 = ("auto_round:fp8", "auto_round:fp8_static")


def other_method(found: QuantizationConfig) -> QuantizationConfig | None:
    """The same configuration as compressed-tensors or fp8 would write it; None when the tensors are packed words.

    Args:
        found: a configuration with a quant_method of AutoRound.

    Raises:
        CheckpointError: values of a wrong type, or a data type that neither reader takes.
    """
    packing = found.values.get("packing_format")
    if packing == _TO_COMPRESSED_TENSORS:
        return QuantizationConfig(
            "compressed-tensors", _compressed_tensors(found.values, found.where), found.where
        )
    if packing in _TO_FP8:
        return QuantizationConfig("fp8", _fp8(found.values, found.where), found.where)
    return None


def _compressed_tensors(values: dict[str, Any], where: str) -> dict[str, Any]:
    accept(values.get("data_type", "int"), ("int",), "data_type", where)
    setting = layer_setting(values, where)
    weights = {
        "num_bits": setting.bits,
        "type": "int",
        "symmetric": setting.sym is not False,
        "strategy": "channel" if setting.group_size == -1 else "group",
        "group_size": None if setting.group_size == -1 else setting.group_size,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": _activations(values, where)}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": ["re:.*lm_head", *_in_float(values, where)],
    }


def _activations(values: dict[str, Any], where: str) -> dict[str, Any] | None:
    bits = values.get("act_bits", FLOAT_BITS)
    if type(bits) is int and bits >= FLOAT_BITS:
        return None
    accept(bits, (8,), "act_bits", where)
    accept(values.get("act_data_type", "int"), ("int",), "act_data_type", where)
    accept(values.get("act_dynamic", True), (True,), "act_dynamic", where)
    accept(values.get("act_sym", True), (True,), "act_sym", where)
    return {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def _fp8(values: dict[str, Any], where: str) -> dict[str, Any]:
    size = values.get("group_size")
    said = {
        "quant_method": "fp8",
        "fmt": values.get("fmt", "e4m3"),
        "activation_scheme": values.get("activation_scheme", "dynamic"),
        "modules_to_not_convert": ["lm_head", *_in_float(values, where)],
    }
    return said | ({"weight_block_size": size} if isinstance(size, list) else {})


def _in_float(values: dict[str, Any], where: str) -> list[str]:
    """Layers that extra_config leaves in float by their whole names; for patterns, the tensors tell."""
    extra = mapping(values, "extra_config", where)
    skipped = names(values, "modules_to_not_convert", where)
    for name, said in extra.items():
        bits = said.get("bits") if isinstance(said, dict) else None
        if type(bits) is int and bits >= FLOAT_BITS and "*" not in name:
            skipped.append(name)
    return skipped
