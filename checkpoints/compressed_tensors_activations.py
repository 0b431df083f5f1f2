"""What the activations of a compressed-tensors layer become: ``input_activations`` of its group.

int8 has the scale and zero point of the file where they are static, one for the tensor; with zero points per token it
is ``int8_affine_f32``, the nearest that kernels have to what the tool computes (docs/numerics.md). All else is made per
token when the program runs, int8 by absmax / 127 or e4m3 by absmax / 448. A note says what differs from what the
checkpoint asks for.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from halfbyte.checkpoints.compressed_tensors_args import QuantizationArgs
from halfbyte.checkpoints.contradictions import Contradictions
from halfbyte.checkpoints.experts import is_of_expert
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.checkpoints.static_input import static_input
from halfbyte.checkpoints.stored_layer import StoredLayer
from halfbyte.passes.report import Refusal
from halfbyte.passes.scheme import Activations

_ADVICE = "choose with --activations, or compile with --on-unsupported float"
_STATIC = ("input_scale", "input_zero_point")
_NEAR = (
    "activations with a zero point per token are rounded as torchao rounds them, to codes that seldom differ from "
    "those of compressed-tensors (docs/numerics.md)"
)
_Layer = TypeVar("_Layer", bound=StoredLayer)


def with_activations(
    layer: _Layer,
    asked: QuantizationArgs | None,
    inputs: int | None,
    tensors: SafetensorsFolder,
    contradictions: Contradictions,
) -> _Layer:
    """The layer with the activations asked for, or with none and why they cannot be computed.

    Args:
        layer: without.
        asked: its ``input_activations``.
        inputs: that share an activation scale in the layer's operator; None for the whole token.
        tensors: static scales are read from.
        contradictions: gets the notes.

    Raises:
        CheckpointError: naming the tensor of a static scale or zero point, which is missing or impossible.
    """
    if asked is None:
        return layer
    per = "token" if inputs is None else f"token and block of {inputs} inputs"
    fits = asked.strategy in ("tensor", "token") or asked.group_size == inputs
    if asked.bits != 8 or asked.local or not (fits or not asked.dynamic):
        accepted = f"8 bits per {per}, or none"
        refusal = Refusal(layer.name, f"activations {asked}", accepted, _ADVICE)
        return dataclasses.replace(layer, refused_activations=refusal)
    if not asked.is_float and not is_of_expert(layer.name):
        if not asked.dynamic and asked.strategy == "tensor":
            fixed = static_input(layer.name, _STATIC, asked.symmetric, tensors, contradictions)
            return dataclasses.replace(layer, activations=Activations.INT8_FIXED, fixed=fixed)
        if asked.dynamic and asked.strategy == "token" and not asked.symmetric:
            contradictions.add(layer.name, _NEAR)
            return dataclasses.replace(layer, activations=Activations.INT8_AFFINE_F32)
    for note in _differences(layer.name, asked, inputs, per):
        contradictions.add(layer.name, note)
    activations = Activations.FP8 if asked.is_float else Activations.INT8
    return dataclasses.replace(layer, activations=activations)


def _differences(name: str, asked: QuantizationArgs, inputs: int | None, per: str) -> list[str]:
    """What is done instead of what is asked for, by scales per token (and block of inputs) without zero points."""
    of = " of experts" if is_of_expert(name) and not asked.is_float else ""
    notes = []
    if not asked.dynamic:
        notes.append(f"static input scales{of} are not used, inputs are quantized per {per}")
    elif asked.strategy != ("token" if inputs is None else "group"):
        notes.append(f"the checkpoint asks for activations {asked}, they are quantized per {per} here")
    if not asked.symmetric:
        notes.append(f"the checkpoint asks for activations{of} with zero points, here they are symmetric")
    return notes
