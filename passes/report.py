"""What was done with each layer, and why: the rows of report.json and of the compile summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from halfbyte.errors import UnsupportedLayerError


@dataclass(frozen=True)
class Refusal:
    """Why something was not done. A value, not an exception: all of them are gathered and shown together."""

    layer: str
    found: str
    accepted: str
    advice: str

    def __str__(self) -> str:
        return f"{self.layer}: found {self.found}; accepted: {self.accepted}; do: {self.advice}"


@dataclass
class LayerRow:
    """One linear layer of the model.

    Attributes:
        name: module path.
        shape: logical (N, K).
        storage: how the checkpoint or graph holds it, e.g. ``gptq v1``.
        scheme: text of its `WeightScheme`, or ``float``.
        activations: ``int8`` (or another of its roundings, such as ``int8_affine``), ``fp8``, ``none`` or ``float``.
        mode: the field's name of both, e.g. ``W4A8``, or ``float``.
        kernel: what computes it in the program, filled in by the lowering.
        reason: why it was left in float, merged, or anything else a user should know.
    """

    name: str
    shape: tuple[int, int]
    storage: str
    scheme: str
    activations: str
    mode: str = "float"
    kernel: str = ""
    reason: str = ""


@dataclass
class Report:
    """Everything `report.json` holds about layers and passes.

    Attributes:
        layers: every linear layer of the model.
        refusals: what could not be done, with reasons.
        warnings: contradictions of the checkpoint, and what was assumed.
        passes: name, seconds and number of changes of each pass.
        merged: linears that became one, by the name they share in the archive.
        fused: by the layer in the archive, what is computed together with it (`passes.fuse_linears`).
        norms: what computes each RMSNorm that no linear is fused with, or why it was left alone, by its module.
        experts: linears of the experts of a block, by the name of its experts in the archive.
        attention: what computes each attention, or why it was left alone.
        head: which head was chosen, ``choice`` (keep, int8, int4), and where it was measured what int8 costs, ``kl`` in
            nats, of the ``limit`` that it may.
    """

    layers: list[LayerRow] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    passes: list[dict[str, Any]] = field(default_factory=list)
    merged: dict[str, list[str]] = field(default_factory=dict)
    fused: dict[str, str] = field(default_factory=dict)
    norms: dict[str, str] = field(default_factory=dict)
    experts: dict[str, list[str]] = field(default_factory=dict)
    attention: dict[str, str] = field(default_factory=dict)
    head: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def raise_refusals(self) -> None:
        """Raises one `UnsupportedLayerError` that names every refused layer, if there is one."""
        raise_refusals(self.refusals)


def raise_refusals(refusals: Sequence[Refusal]) -> None:
    if not refusals:
        return
    first = refusals[0]
    if len(refusals) == 1:
        raise UnsupportedLayerError(
            "this layer cannot be compiled as asked",
            where=first.layer,
            found=first.found,
            accepted=first.accepted,
            advice=first.advice,
        )
    shown = "\n".join(f"  {refusal}" for refusal in refusals[:20])
    more = f"\n  and {len(refusals) - 20} more" if len(refusals) > 20 else ""
    raise UnsupportedLayerError(f"{len(refusals)} layers cannot be compiled as asked:\n{shown}{more}")
