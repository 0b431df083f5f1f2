"""The static scale and zero point of a layer's input: one of each, in tensors beside its weight."""

from __future__ import annotations

import torch

from halfbyte.checkpoints.contradictions import Contradictions
from halfbyte.checkpoints.float_parameters import missing_tensor
from halfbyte.checkpoints.layer_tensors import require
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.errors import CheckpointError
from halfbyte.passes.ops.int8_roundings import FixedRounding
from halfbyte.passes.weight import FLOAT_DTYPES

_SCALE, _ZERO = "input_scale", "input_zero_point"
_SHAPES = ((1,), ())
_WHOLE = (torch.int8, torch.int32, torch.int64)
_DAMAGED = "the checkpoint is damaged, or its calibration failed"


def static_input(
    name: str, symmetric: bool, tensors: SafetensorsFolder, contradictions: Contradictions
) -> FixedRounding:
    """What int8 codes of a layer's input are made with: ``input_scale`` and, if it is there, ``input_zero_point``.

    Args:
        name: of the layer.
        symmetric: the configuration says that there is no zero point; one that is not 0 counts nevertheless.
        contradictions: gets a note of that.

    Raises:
        CheckpointError: naming the tensor: it is missing, is no single number, or an impossible one.
    """
    require(name, tensors, _SCALE)
    scale = _number(f"{name}.{_SCALE}", tensors, tuple(FLOAT_DTYPES.values()))
    zero = 0.0
    if f"{name}.{_ZERO}" in tensors:
        zero = _number(f"{name}.{_ZERO}", tensors, _WHOLE)
    elif not symmetric:
        raise missing_tensor([f"{name}.{_ZERO}"], tensors, "the configuration says symmetric = false")
    if not FixedRounding(scale).computed:
        raise _impossible(_SCALE, name, scale, "a number above 0, it and its inverse normal float32")
    found = FixedRounding(scale, int(zero))
    if not found.computed:
        raise _impossible(_ZERO, name, found.zero, "a whole number from -128 to 127")
    if symmetric and found.zero:
        message = "the configuration says symmetric activations, input_zero_point is not 0"
        contradictions.add(name, message)
    return found


def _number(key: str, tensors: SafetensorsFolder, dtypes: tuple[torch.dtype, ...]) -> float:
    stored = tensors[key]
    if stored.shape not in _SHAPES or stored.dtype not in dtypes:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise CheckpointError(
            "no single number for the inputs of the layer",
            where=key,
            found=f"{str(stored.dtype).removeprefix('torch.')} {list(stored.shape)}",
            accepted=f"{kinds} [1] or []",
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
