"""`Fp8Experts`: the module that stands where the routed experts of a block stood, if their weights are e4m3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import halfbyte.passes.ops  # noqa: F401  registers torch.ops.halfbyte
from halfbyte.passes.scheme import Activations, Fp8Scheme
from halfbyte.passes.weight import FLOAT_DTYPES


@dataclass(frozen=True)
class Fp8ExpertsScheme:
    """How the experts of one block are quantized: all alike.

    Attributes:
        up: of gate and up.
        down: of down.
        bias: whether the linears have one.
        glu: ``silu`` or ``oai``.
        limit: of gate and up where glu is ``oai``.
    """

    up: Fp8Scheme
    down: Fp8Scheme
    bias: bool = False
    glu: str = "silu"
    limit: float = 0.0


class Fp8Experts(torch.nn.Module):
    """Routed experts with e4m3 weights, computed by ``halfbyte::fp8_block_moe``; otherwise as `QuantExperts`.

    Args:
        name: module path; names the layer in reports and its parameters in the archive.
        scheme: how the weights are quantized.
        linears: gate, up and down of every expert, by their names in the checkpoint.
        hidden: width H of the block's input and output.
        inner: width I between up and down.
        activations: FP8 (per token and block of inputs) or NONE.
    """

    def __init__(
        self,
        name: str,
        scheme: Fp8ExpertsScheme,
        linears: Sequence[str],
        hidden: int,
        inner: int,
        *,
        activations: Activations,
    ) -> None:
        super().__init__()
        self.name, self.scheme, self.linears, self.shape = name, scheme, tuple(linears), (inner, hidden)
        self.activations = activations
        self._side("up", scheme.up, 2, inner, hidden)
        self._side("down", scheme.down, 1, hidden, inner)

    @property
    def experts(self) -> int:
        """Their number E."""
        return len(self.linears) // 3

    def _side(self, side: str, scheme: Fp8Scheme, count: int, outputs: int, inputs: int) -> None:
        blocks = (count * -(-outputs // scheme.block_outputs), -(-inputs // scheme.block_inputs))
        empty = lambda size, kind: torch.empty((self.experts, *size), dtype=kind, device="meta")  # noqa: E731
        self.register_buffer(f"{side}_codes", empty((count * outputs, inputs), torch.uint8))
        self.register_buffer(f"{side}_scale", empty(blocks, FLOAT_DTYPES[scheme.scale_dtype]))
        bias = empty((count * outputs,), torch.float32) if self.scheme.bias else None
        self.register_buffer(f"{side}_bias", bias)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        scheme, sides = self.scheme, ("up", "down")
        return torch.ops.halfbyte.fp8_block_moe(
            hidden_states,
            top_k_index,
            top_k_weights.float(),
            *(getattr(self, f"{side}_{part}") for side in sides for part in ("codes", "scale", "bias")),
            scheme.up.block_outputs,
            scheme.up.block_inputs,
            scheme.down.block_outputs,
            scheme.down.block_inputs,
            self.activations.value,
            scheme.glu,
            scheme.limit,
        )

    def extra_repr(self) -> str:
        return f"{self.name}, {self.experts} experts, {self.scheme}, activations {self.activations.value}"
