"""Which head a compilation takes (``--lm-head``), and what rounding it costs on the model at hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from halfbyte.compile_phases import Watch
from halfbyte.layer_activations import LayerActivations
from halfbyte.lowering.options import CompileOptions

if TYPE_CHECKING:
    from halfbyte.checkpoints import Checkpoint

MOST = 1e-3  # nats: what ``auto`` lets a rounded head cost
SMALLEST = 1 << 24  # bytes in float32: a smaller head is read in no time, and left alone


def choose_head(
    checkpoint: Checkpoint, options: CompileOptions, activations: LayerActivations, watch: Watch
) -> tuple[Checkpoint, dict[str, Any]]:
    """The checkpoint with the head that the options ask for, and what the report says of it.

    ``auto`` rounds a large float head to 8 bits if that costs less than `MOST` on the model: the divergence of the
    next token's probabilities, between the head in float and the rounded one with its own activations, both given the
    float model's last hidden states. Other choices are taken as they are, and nothing is measured.

    Raises:
        UsageError: see `with_head`.
    """
    from halfbyte.checkpoints.quantized_head import with_head
    from halfbyte.head_cost import head_cost

    if options.lm_head != "auto":
        return with_head(checkpoint, options.lm_head), {"choice": options.lm_head}
    if (name := measured_head(checkpoint)) is None:
        return checkpoint, {"choice": "keep"}
    rounded = with_head(checkpoint, "int8")
    layer = rounded.layers[name]
    if activations.refused(layer) is not None:
        return checkpoint, {"choice": "keep"}
    with watch("head"):
        cost = head_cost(checkpoint, rounded, activations.choose(layer), options.cache)
    if not math.isfinite(cost):
        checkpoint.warnings.append(
            "the head stays in float: the float model's logits for a sentence are no numbers"
        )
        return checkpoint, {"choice": "keep"}
    choice = "int8" if cost <= MOST else "keep"
    said = {"choice": choice, "kl": cost, "limit": MOST}
    return (rounded if choice == "int8" else checkpoint), said


def measured_head(checkpoint: Checkpoint) -> str | None:
    """The name of the head that ``auto`` would measure, if there is one: large, and in float."""
    from halfbyte.checkpoints.quantized_head import float_head

    found = float_head(checkpoint)
    return None if found is None or 4 * found.shape[0] * found.shape[1] < SMALLEST else found.name


def chosen_before(report: Mapping[str, Any]) -> str:
    """The choice that a bundle's report.json tells of."""
    head = report.get("head") or {"choice": report["options"].get("lm_head", "keep")}  # 0.2 knows no "head"
    return str(head["choice"])


def reason(said: Mapping[str, Any]) -> str:
    """What a compilation's summary says of a head that was measured; nothing of others."""
    if "kl" not in said:
        return ""
    if said["choice"] == "int8":
        return f"rounded to int8, which costs KL {said['kl']:.1e}"
    return f"kept in float: int8 would cost KL {said['kl']:.1e}, over {said['limit']:.0e}"
