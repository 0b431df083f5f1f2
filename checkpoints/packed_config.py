"""What a configuration says about each layer of packed words: GPTQ's, AWQ's and AutoRound's have this in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from halfbyte.checkpoints.config_values import flag
from halfbyte.checkpoints.layer_rules import Rule, first_fit
from halfbyte.checkpoints.packing import Packing
from halfbyte.errors import CheckpointError

FLOAT_BITS = 16  # auto-round writes bits 16 for a layer it leaves in float


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
    desc_act: bool | None = None


@dataclass(frozen=True)
class PackedConfig:
    """A checked configuration.

    Attributes:
        packings: layouts the tensors may have; the first is the one the configuration means.
        format: in words, e.g. ``gptq v1``.
        where: where it was found.
        default: the setting of layers that no rule names.
        rules: tried in order, the first that fits counts.
        covers: whether a layer that no rule names is to be quantized.
    """

    packings: tuple[Packing, ...]
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
        said = {**dataclasses.asdict(self.default), **rule.override}
        setting = layer_setting(said, f"{self.where}, rule {rule.text[:100]!r}")
        return None if setting.bits >= FLOAT_BITS else setting


def layer_setting(values: dict[str, Any], where: str) -> LayerSetting:
    """The keys ``bits``, ``group_size``, ``sym`` and ``desc_act``.

    Raises:
        CheckpointError: one of them is of a wrong type or impossible.
    """
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
    return LayerSetting(bits, group_size, flag(values, "sym", where), flag(values, "desc_act", where))


def override(text: str, value: Any, where: str) -> dict[str, Any]:
    """What the rule `text` changes.

    Raises:
        CheckpointError: it is no object.
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CheckpointError(
            f"the rule {text[:200]!r} gives no object", where=where, found=type(value).__name__
        )
    return {key: value[key] for key in ("bits", "group_size", "sym", "desc_act") if key in value}
