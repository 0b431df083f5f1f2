"""What a GPTQ or AutoRound (auto_gptq packing) configuration says about each layer.

Semantics: gptqmodel's and AutoGPTQ's quantize_config.json (``dynamic`` rules are tried in order with
``re.match``), and auto-round's config with ``extra_config`` (exact name, then end of name, then regular
expressions with ``re.search``, in the order vLLM looks them up).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from halfbyte.checkpoints.layer_rules import Match, Rule, first_fit
from halfbyte.checkpoints.quantization_config import QuantizationConfig
from halfbyte.errors import CheckpointError

AUTO_ROUND = ("auto-round", "intel/auto-round", "inc")
_FLOAT_BITS = 16  # auto-round writes bits 16 for a layer it leaves in float
_PATTERN_CHARACTERS = frozenset("*+?^$()[]{}|\\")
_VERSIONS = {"gptq": 1, "gptq_v2": 2}


@dataclass(frozen=True)
class LayerSetting:
    """What the configuration says about one layer.

    Attributes:
        bits: of a weight.
        group_size: inputs per group, -1 for one group per row.
        sym: whether zero points are all in the middle; None when not said.
        desc_act: whether inputs were put into groups by activation order; None when not said.
    """

    bits: int
    group_size: int
    sym: bool | None
    desc_act: bool | None


@dataclass(frozen=True)
class GptqConfig:
    """A checked configuration.

    Attributes:
        version: of the zero points: 1 stores z - 1, 2 stores z.
        format: in words, e.g. ``gptq v1``.
        where: where it was found.
        default: the setting of layers that no rule names.
        rules: tried in order, the first that fits counts.
        covers: whether a layer that no rule names is to be quantized.
    """

    version: int
    format: str
    where: str
    default: LayerSetting
    rules: tuple[Rule, ...]
    covers: Callable[[str], bool]

    def setting(self, layer: str) -> LayerSetting | None:
        """What is said about `layer`; None when it is to stay in float.

        Raises:
            CheckpointError: an override of a wrong type, or a bad pattern.
        """
        rule = first_fit(self.rules, layer)
        if rule is None:
            return self.default if self.covers(layer) else None
        if rule.override is None:
            return None
        setting = _setting(
            {**_as_dict(self.default), **rule.override}, f"{self.where}, rule {rule.text[:100]!r}"
        )
        return None if setting.bits >= _FLOAT_BITS else setting


def gptq_config(found: QuantizationConfig) -> GptqConfig:
    """Checks a configuration with quant_method ``gptq``.

    Raises:
        CheckpointError: a layout of tensors this reader does not know, or values of a wrong type.
    """
    values, where = found.values, found.where
    version = _version(values, where)
    dynamic = _object(values, "dynamic", where)
    rules = tuple(_dynamic_rule(text, override, where) for text, override in dynamic.items())
    blocks = _names(values, "modules_in_block_to_quantize", where)
    head = values.get("lm_head") is True

    def covers(layer: str) -> bool:
        if layer == "lm_head":
            return head
        return not blocks or any(part in layer for part in blocks)

    return GptqConfig(version, f"gptq v{version}", where, _setting(values, where), rules, covers)


def auto_round_config(found: QuantizationConfig) -> GptqConfig:
    """Checks a configuration of auto-round whose tensors are packed like GPTQ's version 1, without g_idx.

    Raises:
        CheckpointError: another packing or data type, quantized activations, or values of a wrong type.
    """
    values, where = found.values, found.where
    packing = values.get("packing_format", "auto_round:auto_gptq")
    _accept(
        packing, ("auto_round:auto_gptq",), "packing_format", where, "other packings are not supported yet"
    )
    _accept(values.get("data_type", "int"), ("int",), "data_type", where)
    activation_bits = values.get("act_bits")
    if activation_bits is not None and (type(activation_bits) is not int or activation_bits < _FLOAT_BITS):
        _accept(activation_bits, (_FLOAT_BITS,), "act_bits", where)
    blocks = _names(values, "block_name_to_quantize", where) or _names(values, "to_quant_block_names", where)
    extra = _object(values, "extra_config", where)

    def covers(layer: str) -> bool:
        if layer == "lm_head":
            return False
        return not blocks or any(layer == block or layer.startswith(block + ".") for block in blocks)

    return GptqConfig(
        1, "auto-round (gptq v1)", where, _setting(values, where), _extra_rules(extra, where), covers
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
        _accept(value, tuple(_VERSIONS), key, where)
    versions = {_VERSIONS[value] for value in said.values()}
    if len(versions) > 1:
        raise CheckpointError("checkpoint_format and format disagree", where=where, found=repr(said)[:200])
    _accept(values.get("pack_dtype", "int32"), ("int32",), "pack_dtype", where)
    return versions.pop() if versions else 1


def _setting(values: dict[str, Any], where: str) -> LayerSetting:
    bits, group_size = values.get("bits"), values.get("group_size", -1)
    if type(bits) is not int or not 1 <= bits <= 64:
        raise CheckpointError(
            "bits is missing or impossible", where=where, found=repr(bits)[:100], accepted="an integer"
        )
    if group_size is None or group_size == 0:
        group_size = -1  # both are written for one group per row
    if type(group_size) is not int or group_size < -1:
        raise CheckpointError(
            "group_size is impossible",
            where=where,
            found=repr(group_size)[:100],
            accepted="a positive integer, or -1 for one group per row",
        )
    return LayerSetting(bits, group_size, _flag(values, "sym", where), _flag(values, "desc_act", where))


def _flag(values: dict[str, Any], key: str, where: str) -> bool | None:
    value = values.get(key)
    if value is not None and type(value) is not bool:
        raise CheckpointError(
            f"{key} is impossible", where=where, found=repr(value)[:100], accepted="true or false"
        )
    return value


def _as_dict(setting: LayerSetting) -> dict[str, Any]:
    return dataclasses.asdict(setting)


def _dynamic_rule(text: str, override: Any, where: str) -> Rule:
    if text.startswith("-:"):
        return Rule(Match.START, text[2:], None, where)
    return Rule(Match.START, text.removeprefix("+:"), _override(text, override, where), where)


def _extra_rules(extra: dict[str, Any], where: str) -> tuple[Rule, ...]:
    overrides = {text: _override(text, override, where) for text, override in extra.items()}
    plain = {text: value for text, value in overrides.items() if not _PATTERN_CHARACTERS & set(text)}
    patterns = {text: value for text, value in overrides.items() if text not in plain}
    return (
        *(Rule(Match.EXACT, text, value, where) for text, value in plain.items()),
        *(Rule(Match.SUFFIX, text, value, where) for text, value in plain.items()),
        *(Rule(Match.SEARCH, text, value, where) for text, value in patterns.items()),
    )


def _override(text: str, override: Any, where: str) -> dict[str, Any]:
    if override is None:
        return {}
    if not isinstance(override, dict):
        raise CheckpointError(
            f"the rule {text[:200]!r} gives no object", where=where, found=type(override).__name__
        )
    return {key: override[key] for key in ("bits", "group_size", "sym", "desc_act") if key in override}


def _object(values: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    value = values.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{key} is no object", where=where, found=type(value).__name__)
    return value


def _names(values: dict[str, Any], key: str, where: str) -> list[str]:
    """A text with commas, a list, or a list of lists, as one list of names."""
    value = values.get(key)
    if value is None:
        return []
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    if isinstance(value, list):
        flat = [name for part in value for name in (part if isinstance(part, list) else [part])]
        if all(isinstance(name, str) for name in flat):
            return flat
    raise CheckpointError(f"{key} is no list of names", where=where, found=repr(value)[:200])


def _accept(value: Any, accepted: tuple[Any, ...], key: str, where: str, advice: str | None = None) -> None:
    if not any(value == one and type(value) is type(one) for one in accepted):
        raise CheckpointError(
            f"{key} is not one this version reads",
            where=where,
            found=repr(value)[:100],
            accepted=", ".join(str(one) for one in accepted),
            advice=advice,
        )
