"""``halfbyte::linear``: a linear layer with int4 or int8 weights and int8, e4m3 or float activations."""

from __future__ import annotations

import torch

from halfbyte.passes.levels import Levels
from halfbyte.passes.ops.digit_planes import digit_block, digit_planes
from halfbyte.passes.ops.float32 import flush, fma
from halfbyte.passes.ops.int8_roundings import FIXED, column_sums, int8_rounded
from halfbyte.passes.ops.library import LIBRARY
from halfbyte.passes.ops.quantize_fp8 import quantize_fp8
from halfbyte.passes.ops.quantize_per_token import quantize_per_token
from halfbyte.passes.scheme import Activations
from halfbyte.passes.weight import unpack_nibbles

# Every e4m3 value is a whole number of 2^-9.
_E4M3_UNITS = 512.0

LIBRARY.define(
    "linear(Tensor x, Tensor codes, Tensor scale, Tensor? zero, Tensor? minimum, Tensor? bias, "
    "int bits, int group_size, str activations, int digits, int min_tokens, "
    'str levels="integers", Tensor? fixed=None) -> Tensor'
)


def linear(
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
    levels: str = "integers",
    fixed: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = x @ W^T + bias with W[n, k] = scale[n, g] * (u[n, k] - zero[n, g]) or scale[n, g] * u[n, k] + minimum[n, g].

    With a table of `Levels`, W[n, k] = scale[n, g] * table[u[n, k]], and its integers go the way of ``u - zero``.

    ``activations="int8"`` (W4A8, W8A8): x is quantized per token (`quantize_per_token`). The sum over a group is
    an exact int32; groups are scaled and added in float32 in ascending order by fused multiply-adds (for
    ``minimum``: one more, of the sum of the activation codes), times the token's scale, plus the bias.
    ``activations="int8_affine"``, ``"int8_affine_f32"``, ``"int8_symmetric"`` and ``"int8_fixed"`` round x as
    PyTorch's own tools do (`int8_rounded`). Where codes have a zero point, the sum of all groups loses zero times the
    sum of the output's weights (`column_sums`) by one fused multiply-add, before it is multiplied by the token's scale.
    ``activations="fp8"`` (W4AFP8): x is quantized to e4m3 per token (`quantize_fp8`); sums over blocks of at most
    128 inputs (`digit_block`) are exact, in units of 2^-9, rounded to float32 once, then as above.
    ``activations="none"`` (W4A16, W8A16): x is cut into ``digits`` digit planes (`digit_planes`); digit sums of a
    block are exact integers, the two low ones joined as an int32, the third added by one fma, times the block's
    power-of-two scale (exact), then as above.
    The result is cast to the dtype of x once, at the end. Every row equals the same row computed alone.

    Args:
        x: float32, float16 or bfloat16 [..., K]; no rows and one row are fine.
        codes: uint8 [N, ceil(K / 2)], low nibble = even k; [N, K] where ``bits`` is 8.
        scale: float32, float16 or bfloat16 [N, G], G = ceil(K / group_size).
        zero: uint8 [N, G], or None for 8 (128 of 8 bits) everywhere, 0 where ``minimum`` is given.
        minimum: of the dtype of ``scale`` [N, G], or None.
        bias: float [N] or None.
        bits: of the codes, 4 or 8; fp8 activations take 4 (`Levels.exact_with_e4m3`).
        group_size: inputs per group, the last group may be shorter; K for channelwise.
        activations: ``int8`` or another of its roundings, ``fp8`` or ``none``.
        digits: digit planes of the float path, 2 or 3.
        min_tokens: with quantized activations, fewer tokens than this take the float path. 0: never. The choice
            is made per call from the number of rows, so a row's bits then depend on the batch.
        levels: what codes stand for, the value of a `Levels`. A table takes 4 bits, and neither zero nor minimum.
        fixed: for ``int8_fixed`` alone, what all tokens are rounded with: float32 [5], see `int8_rounded`.

    Returns:
        [..., N] of the dtype of x.
    """
    inputs, outputs = x.shape[-1], codes.shape[0]
    rows = x.reshape(-1, inputs)
    kind, zero_point = Activations(activations), None
    loose, table = unpack_nibbles(codes, inputs) if bits == 4 else codes, Levels(levels)
    unsigned = (table.of(loose) if table.table else loose).to(torch.float64)
    group = torch.arange(inputs) // group_size
    if zero is not None:
        unsigned = unsigned - zero.to(torch.float64)[:, group]
    elif minimum is None and not table.table:
        unsigned = unsigned - 2.0 ** (bits - 1)
    block, block_scale, row_scale = digit_block(group_size, inputs), None, None
    if kind is Activations.NONE or rows.shape[0] < min_tokens:
        planes, block_scale = digit_planes(rows, digits, block)
    elif kind.is_int8:
        if kind is Activations.INT8:
            quantized, row_scale = quantize_per_token(rows)
        else:
            quantized, row_scale, zero_point = int8_rounded(rows, kind, fixed)
        planes, block = quantized.unsqueeze(1), group_size
    else:
        values, scale_fp8 = quantize_fp8(rows)
        planes, row_scale = (values * _E4M3_UNITS).unsqueeze(1), flush(scale_fp8 / _E4M3_UNITS)
    total = torch.zeros(rows.shape[0], outputs, dtype=torch.float32)
    for start in range(0, inputs, block):
        part = slice(start, min(start + block, inputs))
        piece = planes[:, :, part].to(torch.float64)
        value = _join(piece @ unsigned[:, part].T)
        unit = None if block_scale is None else block_scale[:, start // block, None]
        value = value if unit is None else value * unit
        total = fma(value, scale.float()[:, start // group_size], total)
        if minimum is not None:
            value = _join(piece.sum(-1, keepdim=True))
            value = value if unit is None else value * unit
            total = fma(value, minimum.float()[:, start // group_size], total)
    if zero_point is not None and kind.has_zeros:
        sums = column_sums(loose, scale, zero, minimum, bits, group_size, table)
        total = fma(-zero_point[:, None], sums, total)
    if row_scale is not None:
        total = flush(total * row_scale[:, None])
    if bias is not None:
        total = flush(total + bias.float())
    return total.to(x.dtype).reshape(*x.shape[:-1], outputs)


def _join(sums: torch.Tensor) -> torch.Tensor:
    """Exact integer sums of each digit, float64 [M, P, N] -> float32 [M, N], as the kernels join them."""
    low = sums[:, 0] if sums.shape[1] == 1 else sums[:, 1] * 256 + sums[:, 0]
    joined = low.to(torch.float32)
    if sums.shape[1] == 3:
        joined = fma(sums[:, 2].to(torch.float32), torch.tensor(65536.0), joined)
    return joined


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
    levels: str = "integers",
    fixed: torch.Tensor | None = None,
) -> torch.Tensor:
    known = [kind.value for kind in Activations]
    torch._check(
        activations in known, lambda: f"activations must be one of {', '.join(known)}, not {activations!r}"
    )
    wanted = activations == Activations.INT8_FIXED.value
    torch._check(
        wanted == (fixed is not None),
        lambda: (
            f"fixed goes with int8_fixed activations alone, not with {activations!r}"
            if fixed is not None
            else "int8_fixed activations need fixed"
        ),
    )
    torch._check(
        fixed is None or tuple(fixed.shape) == (len(FIXED),),
        lambda: f"fixed must hold {', '.join(FIXED)}, not a tensor of shape {list(fixed.shape)}",  # type: ignore[union-attr]
    )
    torch._check(bits in (4, 8), lambda: f"bits must be 4 or 8, not {bits}")
    torch._check(digits in (2, 3), lambda: f"digits must be 2 or 3, not {digits}")
    check_levels(levels, bits, zero is not None or minimum is not None, activations)
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


def check_levels(levels: str, bits: int, offset: bool, activations: str) -> None:
    """Raises RuntimeError if no kernel has such levels: ``offset`` for zero points or minima beside them."""
    names = [known.value for known in Levels]
    torch._check(levels in names, lambda: f"levels must be one of {', '.join(names)}, not {levels!r}")
    known = Levels(levels)
    plain = known.table is None or (bits == 4 and not offset)
    torch._check(plain, lambda: f"{levels} takes codes of 4 bits and no zero points or minima")
    exact = activations != "fp8" or known.exact_with_e4m3(bits)
    torch._check(exact, lambda: f"fp8 activations are not computed on {known.kind(bits)} weights")


LIBRARY.impl("linear", linear, "CompositeExplicitAutograd")
torch.library.register_fake("halfbyte::linear", _fake, lib=LIBRARY)
