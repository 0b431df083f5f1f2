"""What the activations of a compressed-tensors layer become: ``input_activations`` of its group.

Codes are made per token at run time, int8 by absmax / 127 or e4m3 by absmax / 448 (see docs/numerics.md), also
where the file has static scales or asks for zero points; a note says so.
"""

from __future__ import annotations

from halfbyte.checkpoints.compressed_tensors_args import QuantizationArgs
from halfbyte.checkpoints.contradictions import Contradictions
from halfbyte.passes.report import Refusal
from halfbyte.passes.scheme import Activations

_ADVICE = "choose with --activations, or compile with --on-unsupported float"


def settle_activations(
    name: str, asked: QuantizationArgs | None, inputs: int | None, contradictions: Contradictions
) -> tuple[Activations, Refusal | None]:
    """The activations of a layer, or NONE and why what is asked for cannot be computed.

    Args:
        name: of the layer.
        asked: its ``input_activations``.
        inputs: that share an activation scale in the layer's operator; None for the whole token.
        contradictions: gets the notes.
    """
    if asked is None:
        return Activations.NONE, None
    per = "token" if inputs is None else f"token and block of {inputs} inputs"
    fits = asked.strategy in ("tensor", "token") or asked.group_size == inputs
    if asked.bits != 8 or asked.local or not (fits or not asked.dynamic):
        accepted = f"8 bits per {per}, or none"
        return Activations.NONE, Refusal(name, f"activations {asked}", accepted, _ADVICE)
    if not asked.dynamic:
        contradictions.add(name, f"static input scales are not used, inputs are quantized per {per}")
    elif asked.strategy != ("token" if inputs is None else "group"):
        contradictions.add(
            name, f"the checkpoint asks for activations {asked}, they are quantized per {per} here"
        )
    if not asked.symmetric:
        contradictions.add(
            name, "the checkpoint asks for activations with zero points, here they are symmetric"
        )
    return Activations.FP8 if asked.is_float else Activations.INT8, None
