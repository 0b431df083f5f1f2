"""`Fp8BlockLinear`: the module that stands where an nn.Linear with an e4m3 weight stood."""

from __future__ import annotations

import torch

import halfbyte.passes.ops  # noqa: F401  registers torch.ops.halfbyte
from halfbyte.passes.scheme import Activations, Fp8Scheme
from halfbyte.passes.weight import FLOAT_DTYPES, Fp8Tensor


class Fp8BlockLinear(torch.nn.Module):
    """A linear layer with an e4m3 weight, computed by ``halfbyte::fp8_block_linear``.

    The weight's buffers are on the meta device until `fill`, as those of `QuantLinear`.

    Args:
        name: module path; names the layer in reports and its parameters in the archive.
        scheme: how the weight is quantized.
        shape: logical (N, K).
        bias: whether there is one.
        activations: FP8 (per token and block of inputs) or NONE.
    """

    def __init__(
        self,
        name: str,
        scheme: Fp8Scheme,
        shape: tuple[int, int],
        *,
        bias: bool,
        activations: Activations,
    ) -> None:
        super().__init__()
        outputs, inputs = shape
        blocks = (-(-outputs // scheme.block_outputs), -(-inputs // scheme.block_inputs))
        self.name, self.scheme, self.shape, self.activations = name, scheme, shape, activations
        empty = lambda size, kind: torch.empty(size, dtype=kind, device="meta")  # noqa: E731
        self.register_buffer("codes", empty(shape, torch.uint8))
        self.register_buffer("scale", empty(blocks, FLOAT_DTYPES[scheme.scale_dtype]))
        self.register_buffer("bias", empty((outputs,), torch.float32) if bias else None)

    def fill(self, weight: Fp8Tensor, bias: torch.Tensor | None = None) -> Fp8BlockLinear:
        """Puts real tensors in place of the meta buffers and returns self."""
        self.codes, self.scale = weight.bits, weight.scale
        self.bias = None if bias is None else bias.float()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.halfbyte.fp8_block_linear(
            x,
            self.codes,
            self.scale,
            self.bias,
            self.scheme.block_outputs,
            self.scheme.block_inputs,
            self.activations.value,
        )

    def extra_repr(self) -> str:
        return f"{self.name}, {self.shape}, {self.scheme}, activations {self.activations.value}"
