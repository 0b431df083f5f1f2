"""GPTQ checkpoints, versions 1 and 2: what their configuration says about each layer.

Semantics: gptqmodel's and AutoGPTQ's quantize_config.json; ``dynamic`` rules are tried in order with
``re.match``.
"""

from __future__ import annotations

from typing import Any

from halfbyte.checkpoints.awq_packing import AwqPacking
from halfbyte.checkpoints.config_values import accept, mapping, names
from halfbyte.checkpoints.gptq_packing import GptqPacking
from halfbyte.checkpoints.layer_rules import Match, Rule, first_fit
from halfbyte.checkpoints.model_folder import ModelFolder
from halfbyte.checkpoints.names_in_file import is_head
from halfbyte.checkpoints.packed_config import PackedConfig, layer_setting, override
from halfbyte.checkpoints.packed_reader import open_packed
from halfbyte.checkpoints.quantization_config import QuantizationConfig
from halfbyte.checkpoints.quantized_folder import QuantizedFolder
from halfbyte.errors import CheckpointError

_VERSIONS = {"gptq": 1, "gptq_v2": 2}


def open_gptq(folder: ModelFolder) -> QuantizedFolder:
    """A folder with quant_method ``gptq``."""
    assert folder.quantization is not None
    return open_packed(folder, gptq_config(folder.quantization))


def gptq_config(found: QuantizationConfig) -> PackedConfig:
    """Checks a configuration with quant_method ``gptq``.

    Raises:
        CheckpointError: a layout of tensors this reader does not know, or values of a wrong type.
    """
    values, where = found.values, found.where
    version = _version(values, where)
    dynamic = mapping(values, "dynamic", where)
    rules = tuple(_dynamic_rule(text, said, where) for text, said in dynamic.items())
    blocks = [
        Rule(Match.PARTS, name, {}, where) for name in names(values, "modules_in_block_to_quantize", where)
    ]
    head = values.get("lm_head") is True

    def covers(layer: str) -> bool:
        if is_head(layer):
            return head
        return not blocks or first_fit(blocks, layer) is not None

    return PackedConfig(
        (GptqPacking(version), AwqPacking()),
        f"gptq v{version}",
        where,
        layer_setting(values, where),
        rules,
        covers,
    )


def _version(values: dict[str, Any], where: str) -> int:
    if values.get("is_marlin_format"):
        raise CheckpointError(
            "tensors in Marlin's layout cannot be read",
            where=where,
            found="is_marlin_format",
            accepted=", ".join(_VERSIONS),
            advice="use the GPTQ checkpoint it was made from",
        )
    said = {key: values[key] for key in ("checkpoint_format", "format") if values.get(key) is not None}
    for key, value in said.items():
        accept(value, tuple(_VERSIONS), key, where)
    versions = {_VERSIONS[value] for value in said.values()}
    if len(versions) > 1:
        raise CheckpointError("checkpoint_format and format disagree", where=where, found=repr(said)[:200])
    accept(values.get("pack_dtype", "int32"), ("int32",), "pack_dtype", where)
    return versions.pop() if versions else 1


def _dynamic_rule(text: str, said: Any, where: str) -> Rule:
    if text.startswith("-:"):
        return Rule(Match.START, text[2:], None, where)
    return Rule(Match.START, text.removeprefix("+:"), override(text, said, where), where)
