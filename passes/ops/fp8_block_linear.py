"""``halfbyte::fp8_block_linear``: a linear layer with e4m3 weights and a scale per block."""

from __future__ import annotations

import torch

from halfbyte.passes.ops.digit_planes import digit_block
from halfbyte.passes.ops.float32 import flush, fma
from halfbyte.passes.ops.library import LIBRARY
from halfbyte.passes.ops.quantize_fp8 import quantize_fp8
from halfbyte.passes.weight import scales_by_row

LIBRARY.define(
    "fp8_block_linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias, int block_outputs, int block_inputs, "
    "str activations) -> Tensor"
)


def fp8_block_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    block_outputs: int,
    block_inputs: int,
    activations: str,
) -> torch.Tensor:
    """y = x @ W^T + bias with W[n, k] = e4m3(weight[n, k]) * scale[n // block_outputs, k // block_inputs].

    ``activations="fp8"``: x is quantized to e4m3 per token and block of inputs, scale absmax / 448 in float32;
    ``"none"``: x stays float. The sum over a block of inputs, or over a `digit_block` of a longer one, is taken
    exactly and rounded to float32 once; these are added in ascending order, each by one fma with (activation
    scale * weight scale): the rule of DeepSeek's block-scaled GEMM. Lowerings add inside a piece in float32, so
    they agree to 1e-6 of a row's largest output.
    Every row equals the same row computed alone.

    Args:
        x: float32, float16 or bfloat16 [..., K].
        weight: uint8 [N, K], the bits of e4m3 values; no NaN.
        scale: float [ceil(N / block_outputs), ceil(K / block_inputs)], multiplies.
        bias: float [N] or None.
        block_outputs: 128; 1 for a scale per output; N for one scale.
        block_inputs: 128; K for scales that span a row.
        activations: ``fp8`` or ``none``.

    Returns:
        [..., N] of the dtype of x.
    """
    inputs, outputs = x.shape[-1], weight.shape[0]
    rows = flush(x.float()).reshape(-1, inputs)
    values = decode_e4m3(weight).double()
    factors = scales_by_row(scale.float(), outputs, block_outputs)
    total, piece = torch.zeros(rows.shape[0], outputs, dtype=torch.float32), digit_block(block_inputs, inputs)
    for block, start in enumerate(range(0, inputs, block_inputs)):
        whole = slice(start, min(start + block_inputs, inputs))
        codes, unit = rows[:, whole], torch.ones(rows.shape[0])
        if activations == "fp8":
            codes, unit = quantize_fp8(codes)
        both = flush(unit[:, None] * factors[:, block])
        for first in range(0, codes.shape[1], piece):
            part = slice(first, first + piece)
            exact = codes[:, part].double() @ values[:, whole][:, part].T
            total = fma(flush(exact.float()), both, total)
    if bias is not None:
        total = flush(total + bias.float())
    return total.to(x.dtype).reshape(*x.shape[:-1], outputs)


def decode_e4m3(bits: torch.Tensor) -> torch.Tensor:
    """float32 values of e4m3 (fn) bits; 0x7f and 0xff are NaN."""
    return bits.view(torch.float8_e4m3fn).float()


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    block_outputs: int,
    block_inputs: int,
    activations: str,
) -> torch.Tensor:
    known = activations in ("fp8", "none")
    torch._check(known, lambda: f"activations must be fp8 or none, not {activations!r}")
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


LIBRARY.impl("fp8_block_linear", fp8_block_linear, "CompositeExplicitAutograd")
torch.library.register_fake("halfbyte::fp8_block_linear", _fake, lib=LIBRARY)
