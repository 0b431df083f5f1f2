"""AutoRound (INC) checkpoints: what their configuration says about each layer, and which reader takes them.

Semantics: auto-round's configuration, with ``extra_config`` looked up as vLLM does it: exact name, then end of
name, then regular expressions with ``re.search`` in order, then the whole model's values.
"""

from __future__ import annotations

import re
from typing import Any

from halfbyte.checkpoints.awq_packing import AwqPacking
from halfbyte.checkpoints.config_values import accept, mapping, names
from halfbyte.checkpoints.gptq_packing import GptqPacking
from halfbyte.checkpoints.layer_rules import Match, Rule
from halfbyte.checkpoints.model_folder import ModelFolder
from halfbyte.checkpoints.names_in_file import is_head
from halfbyte.checkpoints.packed_config import FLOAT_BITS, PackedConfig, layer_setting, override
from halfbyte.checkpoints.packed_reader import open_packed
from halfbyte.checkpoints.packing import Packing
from halfbyte.checkpoints.quantization_config import QuantizationConfig
from halfbyte.checkpoints.quantized_folder import QuantizedFolder
from halfbyte.errors import CheckpointError

AUTO_ROUND = ("auto-round", "auto_round", "intel/auto-round", "inc")
_GPTQ, _PLAIN, _AWQ = GptqPacking(1), GptqPacking(2), AwqPacking()
# What auto-round's own layers pack: "auto_round" and gptqmodel's way store zero points as they are.
_PACKINGS: dict[str, tuple[Packing, ...]] = {
    "auto_round:auto_gptq": (_GPTQ, _AWQ),
    "auto_round:gptq": (_GPTQ, _AWQ),
    "auto_round": (_PLAIN, _AWQ),
    "auto_round:gptqmodel": (_PLAIN, _AWQ),
    "auto_round:auto_awq": (_AWQ, _GPTQ),
    "auto_round:awq": (_AWQ, _GPTQ),
}
_PATTERN_CHARACTERS = frozenset("*+?^$()[]{}|\\")
# The end of a pattern that names a router; searched for, it would also be found in gate_proj.
_ROUTER = re.compile(r"(?<=[.])gate(?=\.\*$)")


def open_auto_round(folder: ModelFolder) -> QuantizedFolder:
    """A folder with quant_method ``auto-round`` and tensors in packed words."""
    assert folder.quantization is not None
    return open_packed(folder, auto_round_config(folder.quantization))


def auto_round_config(found: QuantizationConfig) -> PackedConfig:
    """Checks a configuration of auto-round whose tensors are packed like GPTQ's, mostly without g_idx, or AWQ's.

    Raises:
        CheckpointError: another packing or data type, quantized activations, or values of a wrong type.
    """
    values, where = found.values, found.where
    packing = values.get("packing_format", "auto_round:auto_gptq")
    accept(packing, tuple(_PACKINGS), "packing_format", where)
    accept(values.get("data_type", "int"), ("int",), "data_type", where)
    activation_bits = values.get("act_bits")
    if activation_bits is not None and (type(activation_bits) is not int or activation_bits < FLOAT_BITS):
        accept(activation_bits, (FLOAT_BITS,), "act_bits", where)
    blocks = names(values, "block_name_to_quantize", where) or names(values, "to_quant_block_names", where)
    extra = mapping(values, "extra_config", where)

    def covers(layer: str) -> bool:
        if is_head(layer):
            return False
        return not blocks or any(layer == block or layer.startswith(block + ".") for block in blocks)

    packings = _PACKINGS[packing]
    name, rules = f"auto-round ({packings[0].storage})", _extra_rules(extra, where)
    return PackedConfig(packings, name, where, layer_setting(values, where), rules, covers)


def _extra_rules(extra: dict[str, Any], where: str) -> tuple[Rule, ...]:
    overrides = {text: _override(text, said, where) for text, said in extra.items()}
    plain = {text: value for text, value in overrides.items() if not _PATTERN_CHARACTERS & set(text)}
    patterns = {text: value for text, value in overrides.items() if text not in plain}
    return (
        *(Rule(Match.EXACT, text, value, where) for text, value in plain.items()),
        *(Rule(Match.SUFFIX, text, value, where) for text, value in plain.items()),
        *(
            Rule(Match.SEARCH, _ROUTER.sub(r"gate(?!\\w)", text), value, where)
            for text, value in patterns.items()
        ),
    )


def _override(text: str, said: Any, where: str) -> dict[str, Any]:
    changes = override(text, said, where)
    kind = said.get("data_type", "int") if changes or said else "int"
    bits = changes.get("bits")
    if kind != "int" and not (type(bits) is int and bits >= FLOAT_BITS):
        raise CheckpointError(
            f"the rule {text[:200]!r} asks for a data type that cannot be read",
            where=where,
            found=f"data_type {kind!r}, bits {bits!r}"[:200],
            accepted='"int", or bits = 16 for a layer in float',
        )
    return changes
