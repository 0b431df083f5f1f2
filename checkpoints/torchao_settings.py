"""What the metadata of torchao's safetensors say of a tensor: JSON of its class and settings."""

from __future__ import annotations

from typing import Any

from halfbyte.checkpoints.contradictions import Contradictions
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.errors import CheckpointError

CODES, SCALE, ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
_PRE_SCALE = "_weight_act_pre_scale"
_STATIC = ("_weight_act_quant_scale", "_weight_act_quant_zero_point")
PARTS = (CODES, SCALE, ZERO, _PRE_SCALE, *_STATIC)


def block_size(name: str, said: dict[str, Any], shape: tuple[int, int], whole: bool) -> tuple[int, int]:
    """(outputs, inputs) that share a scale.

    Args:
        said: the settings.
        shape: (N, K) of the weight.
        whole: whether one scale for all is possible, too, for which an empty list stands.

    Raises:
        CheckpointError: neither one output and at most all inputs, nor all of the weight.
    """
    block = said.get("block_size")
    if whole and block in ([], None, list(shape)):
        return shape
    if isinstance(block, list) and len(block) == 2 and all(type(part) is int for part in block):
        outputs, inputs = block
        if outputs == 1 and 1 <= inputs <= shape[1]:
            return 1, int(inputs)
    accepted = f"[1, inputs per group], at most [1, {shape[1]}]" + (f", or {list(shape)}" if whole else "")
    raise impossible(name, "block_size", block, accepted)


def refuse_weighed_inputs(name: str, tensors: SafetensorsFolder) -> None:
    """Raises a `CheckpointError` where AWQ left a scale for every input beside the weight."""
    if f"{name}.{_PRE_SCALE}" in tensors:
        raise CheckpointError(
            "inputs that are scaled before the product cannot be read",
            where=f"{name}.{_PRE_SCALE}",
            found="a scale for every input",
            accepted="none: AWQ's scales in the norms before",
            advice="quantize the model with another tool, or without AWQ",
        )


def note_static_scales(name: str, tensors: SafetensorsFolder, contradictions: Contradictions) -> None:
    if any(f"{name}.{part}" in tensors for part in _STATIC):
        contradictions.add(name, "static input scales are not used, inputs are quantized per token")


def impossible(layer: str, key: str, found: Any, accepted: str) -> CheckpointError:
    return CheckpointError(
        f"{key} is impossible",
        where=f"the metadata of {layer}.weight",
        found=repr(found)[:100],
        accepted=accepted,
    )
