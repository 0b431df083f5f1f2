"""``halfbyte::fused_linear``: a linear layer with the norm before it and what becomes of its results after it."""

from __future__ import annotations

import torch

from halfbyte.passes.ops.float32 import flush
from halfbyte.passes.ops.library import LIBRARY
from halfbyte.passes.ops.linear import check_levels, linear
from halfbyte.passes.ops.rms_norm import rms_norm
from halfbyte.passes.ops.swiglu import swiglu

LIBRARY.define(
    "fused_linear(Tensor x, Tensor codes, Tensor scale, Tensor? zero, Tensor? minimum, Tensor? bias, int bits, "
    "int group_size, str activations, int digits, int min_tokens, Tensor? norm, float eps, bool plus_one, str glu, "
    'Tensor? residual, str levels="integers", Tensor? fixed=None) -> Tensor'
)


def fused_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    minimum: torch.Tensor | None,
    bias: torch.Tensor | None,
    bits: int,
    group_size: int,
    activations: str,
    digits: int,
    min_tokens: int,
    norm: torch.Tensor | None,
    eps: float,
    plus_one: bool,
    glu: str,
    residual: torch.Tensor | None,
    levels: str = "integers",
    fixed: torch.Tensor | None = None,
) -> torch.Tensor:
    """`linear` of ``rms_norm(x)``, then the product of its halves or the addition of ``residual``: the same bits.

    Args:
        x: float32 [..., K].
        codes, scale, zero, minimum, bias, bits, group_size, activations, digits, min_tokens, fixed: as for `linear`.
        norm: weight of the norm, float32 [K], or None for none.
        eps, plus_one: as for `rms_norm`.
        glu: ``silu`` or ``gelu_tanh``: the first half of the outputs is gate, the second up, and the result is
            their product (`swiglu`); empty for none.
        residual: float32 of the result's shape, or None.
        levels: as for `linear`.

    Returns:
        float32 [..., N], or [..., N / 2] with ``glu``.
    """
    rows = x if norm is None else rms_norm(x, norm, eps, plus_one)
    settings = (bits, group_size, activations, digits, min_tokens, levels, fixed)
    y = linear(rows, codes, scale, zero, minimum, bias, *settings)
    if glu:
        gate, up = y.chunk(2, -1)
        y = swiglu(gate, up, glu, 0.0)
    return y if residual is None else flush(y + flush(residual))


def _fake(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    minimum: torch.Tensor | None,
    bias: torch.Tensor | None,
    bits: int,
    group_size: int,
    activations: str,
    digits: int,
    min_tokens: int,
    norm: torch.Tensor | None,
    eps: float,
    plus_one: bool,
    glu: str,
    residual: torch.Tensor | None,
    levels: str = "integers",
    fixed: torch.Tensor | None = None,
) -> torch.Tensor:
    torch._check(x.dtype == torch.float32, lambda: f"x must be float32, not {x.dtype}")
    torch._check(glu in ("", "silu", "gelu_tanh"), lambda: f"glu must be silu or gelu_tanh, not {glu!r}")
    torch._check(
        not glu or codes.shape[0] % 128 == 0,
        lambda: f"gate and up must have whole blocks of 64 outputs, not {codes.shape[0]} in both",
    )
    torch._check(not glu or residual is None, lambda: "glu and residual exclude each other")
    check_levels(levels, bits, zero is not None or minimum is not None, activations)
    return x.new_empty((*x.shape[:-1], codes.shape[0] // (2 if glu else 1)))


LIBRARY.impl("fused_linear", fused_linear, "CompositeExplicitAutograd")
torch.library.register_fake("halfbyte::fused_linear", _fake, lib=LIBRARY)
