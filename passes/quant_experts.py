"""`QuantExperts`: the module that stands where the routed experts of a mixture-of-experts block stood."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import halfbyte.passes.ops  # noqa: F401  registers torch.ops.halfbyte
from halfbyte.passes.scheme import Activations, WeightScheme, Zero
from halfbyte.passes.weight import FLOAT_DTYPES


@dataclass(frozen=True)
class ExpertsScheme:
    """How the experts of one block are quantized: all alike.

    Attributes:
        up: of gate and up.
        down: of down; its bits and levels are those of ``up``.
        bias: whether the linears have one.
        glu: ``silu`` or ``oai``.
        limit: of gate and up where glu is ``oai``.
    """

    up: WeightScheme
    down: WeightScheme
    bias: bool = False
    glu: str = "silu"
    limit: float = 0.0


class QuantExperts(torch.nn.Module):
    """Routed experts with int4 or int8 weights, computed by ``halfbyte::moe``.

    It is called as transformers calls its own modules of stacked experts. The weights' buffers are made on the meta
    device: the weights are read from the checkpoint, expert by expert, when the archive is written.

    Args:
        name: module path; names the layer in reports and its parameters in the archive.
        scheme: how the weights are quantized.
        linears: gate, up and down of every expert, by their names in the checkpoint.
        hidden: width H of the block's input and output.
        inner: width I between up and down.
        activations: what happens to the inputs of the linears.
        digits: digit planes of float activations: 3 for float32 models, 2 for float16 and bfloat16.
    """

    def __init__(
        self,
        name: str,
        scheme: ExpertsScheme,
        linears: Sequence[str],
        hidden: int,
        inner: int,
        *,
        activations: Activations,
        digits: int,
    ) -> None:
        super().__init__()
        self.name, self.scheme, self.linears, self.shape = name, scheme, tuple(linears), (inner, hidden)
        self.activations, self.digits = activations, digits
        self._side("up", scheme.up, 2 * inner, hidden)
        self._side("down", scheme.down, hidden, inner)

    @property
    def experts(self) -> int:
        """Their number E."""
        return len(self.linears) // 3

    def _side(self, side: str, scheme: WeightScheme, outputs: int, inputs: int) -> None:
        groups, dtype = -(-inputs // scheme.group_size), FLOAT_DTYPES[scheme.scale_dtype]
        empty = lambda size, kind: torch.empty((self.experts, outputs, *size), dtype=kind, device="meta")  # noqa: E731
        packed = -(-inputs // 2) if scheme.bits == 4 else inputs
        integer, minimum = scheme.zero is Zero.INTEGER, scheme.zero is Zero.MINIMUM
        self.register_buffer(f"{side}_codes", empty((packed,), torch.uint8))
        self.register_buffer(f"{side}_scale", empty((groups,), dtype))
        self.register_buffer(f"{side}_zero", empty((groups,), torch.uint8) if integer else None)
        self.register_buffer(f"{side}_minimum", empty((groups,), dtype) if minimum else None)
        self.register_buffer(f"{side}_bias", empty((), torch.float32) if self.scheme.bias else None)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        parts = [
            getattr(self, f"{side}_{part}")
            for side in ("up", "down")
            for part in ("codes", "scale", "zero", "minimum", "bias")
        ]
        return torch.ops.halfbyte.moe(
            hidden_states,
            top_k_index,
            top_k_weights.float(),
            *parts,
            self.scheme.up.bits,
            self.scheme.up.group_size,
            self.scheme.down.group_size,
            self.activations.value,
            self.digits,
            self.scheme.glu,
            self.scheme.limit,
            self.scheme.up.levels.value,
        )

    def extra_repr(self) -> str:
        return f"{self.name}, {self.experts} experts, {self.scheme}, activations {self.activations.value}"
