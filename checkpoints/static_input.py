"""The static scale and zero point of a layer's input: one of each, in tensors beside its weight."""

from __future__ import annotations

import math

import torch

from halfbyte.checkpoints.contradictions import Contradictions
from halfbyte.checkpoints.float_parameters import missing_tensor
from halfbyte.checkpoints.layer_tensors import require
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.errors import CheckpointError
from halfbyte.passes.ops.int8_roundings import FixedRounding
from halfbyte.passes.weight import FLOAT_DTYPES

_WHOLE = (torch.int8, torch.int32, torch.int64)
_DAMAGED = "the checkpoint is damaged, or its calibration failed"


def static_input(
    name: str,
    parts: tuple[str, str],
    symmetric: bool,
    tensors: SafetensorsFolder,
    contradictions: Contradictions,
    codes: tuple[int, int] = (-128, 127),
) -> FixedRounding:
    """What int8 codes of a layer's input are made with: its scale and, if it is there, its zero point.

    Args:
        name: of the layer.
        parts: what the format calls the two tensors.
        symmetric: the configuration says that there is no zero point; one that is not 0 counts nevertheless.
        contradictions: gets a note of that.
        codes: the least and the most.

    Raises:
        CheckpointError: naming the tensor: it is missing, is no single number, or an impossible one.
    """
    scale_part, zero_part = parts
    require(name, tensors, scale_part)
    scale, zero = _number(f"{name}.{scale_part}", tensors, tuple(FLOAT_DTYPES.values())), 0
    if f"{name}.{zero_part}" in tensors:
        zero = int(_number(f"{name}.{zero_part}", tensors, _WHOLE))
    elif not symmetric:
        raise missing_tensor(
            [f"{name}.{zero_part}"], tensors, "the configuration says that there are zero points"
        )
    if not FixedRounding(scale).computed:
        raise _impossible(scale_part, name, scale, "a number above 0, it and its inverse normal float32")
    found = FixedRounding(scale, zero, *codes)
    if not found.computed:
        raise _impossible(zero_part, name, zero, "a whole number from -128 to 127")
    if symmetric and zero:
        contradictions.add(name, f"the configuration says symmetric activations, {zero_part} is not 0")
    return found


def _number(key: str, tensors: SafetensorsFolder, dtypes: tuple[torch.dtype, ...]) -> float:
    stored = tensors[key]
    if math.prod(stored.shape) != 1 or stored.dtype not in dtypes:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise CheckpointError(
            "no single number for the inputs of the layer",
            where=key,
            found=f"{str(stored.dtype).removeprefix('torch.')} {list(stored.shape)}",
            accepted=f"one number, {kinds}",
            advice=_DAMAGED,
        )
    return float(tensors.read(key))


def _impossible(part: str, name: str, found: float, accepted: str) -> CheckpointError:
    return CheckpointError(
        f"{part} is impossible",
        where=f"{name}.{part}",
        found=str(found),
        accepted=accepted,
        advice=_DAMAGED,
    )
