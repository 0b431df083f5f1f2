"""`QuantLinear`: the module that stands where a quantized nn.Linear stood."""

from __future__ import annotations

import torch

import halfbyte.passes.ops  # noqa: F401  registers torch.ops.halfbyte
from halfbyte.passes.ops.int8_roundings import FixedRounding
from halfbyte.passes.scheme import Activations, WeightScheme, Zero
from halfbyte.passes.weight import FLOAT_DTYPES, QuantTensor


class QuantLinear(torch.nn.Module):
    """A linear layer with an int4 or int8 weight, computed by ``halfbyte::linear``.

    The weight's buffers are made on the meta device: the weight itself is read from the checkpoint when the
    archive is written. `fill` gives a module that runs eagerly, with the semantics of the reference.

    Args:
        name: module path; names the layer in reports and its parameters in the archive.
        scheme: how the weight is quantized.
        shape: logical (N, K).
        bias: whether there is one.
        activations: what happens to the input.
        digits: digit planes of the float path: 3 for float32 models, 2 for float16 and bfloat16.
        min_tokens: see ``halfbyte::linear``.
        permutation: int64 [K], the activation order: the layer reads ``x[..., permutation]``.
        fixed: what the input is rounded with where ``activations`` is ``INT8_FIXED``, else None.
    """

    def __init__(
        self,
        name: str,
        scheme: WeightScheme,
        shape: tuple[int, int],
        *,
        bias: bool,
        activations: Activations,
        digits: int,
        min_tokens: int = 0,
        permutation: torch.Tensor | None = None,
        fixed: FixedRounding | None = None,
    ) -> None:
        super().__init__()
        outputs, inputs = shape
        groups = -(-inputs // scheme.group_size)
        dtype = FLOAT_DTYPES[scheme.scale_dtype]
        self.name, self.scheme, self.shape = name, scheme, shape
        self.activations, self.digits, self.min_tokens = activations, digits, min_tokens
        empty = lambda size, kind: torch.empty(size, dtype=kind, device="meta")  # noqa: E731
        self.register_buffer(
            "codes", empty((outputs, -(-inputs // 2) if scheme.bits == 4 else inputs), torch.uint8)
        )
        self.register_buffer("scale", empty((outputs, groups), dtype))
        zero = empty((outputs, groups), torch.uint8) if scheme.zero is Zero.INTEGER else None
        self.register_buffer("zero", zero)
        self.register_buffer(
            "minimum", empty((outputs, groups), dtype) if scheme.zero is Zero.MINIMUM else None
        )
        self.register_buffer("bias", empty((outputs,), torch.float32) if bias else None)
        self.register_buffer("permutation", permutation)
        self.register_buffer("fixed", None if fixed is None else fixed.tensor())

    def fill(self, weight: QuantTensor, bias: torch.Tensor | None = None) -> QuantLinear:
        """Puts real tensors in place of the meta buffers and returns self."""
        self.codes, self.scale = weight.packed(), weight.scale
        self.zero, self.minimum = weight.zero, weight.minimum
        self.bias = None if bias is None else bias.float()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.permutation, torch.Tensor):
            x = torch.index_select(x, -1, self.permutation)
        return torch.ops.halfbyte.linear(
            x,
            self.codes,
            self.scale,
            self.zero,
            self.minimum,
            self.bias,
            self.scheme.bits,
            self.scheme.group_size,
            self.activations.value,
            self.digits,
            self.min_tokens,
            self.scheme.levels.value,
            self.fixed,
        )

    def extra_repr(self) -> str:
        return f"{self.name}, {self.shape}, {self.scheme}, activations {self.activations.value}"
