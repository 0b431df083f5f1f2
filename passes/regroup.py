"""From the codes and scales of every weight to the weight object: groups, signedness, width; or why there is none."""

from __future__ import annotations

import torch

from halfbyte.passes.dequantized_weights import Dequantized
from halfbyte.passes.grouping import find_blocks, find_groups
from halfbyte.passes.report import Refusal
from halfbyte.passes.weight import FLOAT_DTYPES, Fp8Tensor, QuantTensor


def regrouped(name: str, match: Dequantized) -> QuantTensor | Fp8Tensor | Refusal:
    """The weight named ``name``; a refusal where no kernel has its codes, zero points or groups."""
    if not bool(torch.isfinite(match.scale).all()):
        return Refusal(name, "scales that are NaN or Inf", "finite scales", "quantize the layer again")
    scale = match.scale if match.scale.dtype in FLOAT_DTYPES.values() else match.scale.float()
    return _fp8(name, match, scale) if match.fp8 else _integers(name, match, scale)


def _fp8(name: str, match: Dequantized, scale: torch.Tensor) -> Fp8Tensor | Refusal:
    bits = match.codes.contiguous().view(torch.uint8)
    if bool(((bits & 127) == 127).any()):
        return Refusal(name, "e4m3 codes that are NaN", "finite codes", "quantize the layer again")
    outputs, inputs = find_blocks(scale.double())
    return Fp8Tensor(name, bits, scale[::outputs, ::inputs].contiguous(), outputs, inputs)


def _integers(name: str, match: Dequantized, scale: torch.Tensor) -> QuantTensor | Refusal:
    codes, zero = match.codes, match.zero
    low, high = int(codes.min()), int(codes.max())
    bits = 4 if (low >= 0 and high <= 15) or (low >= -8 and high <= 7) else 8
    if match.minimum is None and low < 0:
        codes, zero = codes + 2 ** (bits - 1), zero + 2 ** (bits - 1)
    for label, values in (("codes", codes), ("zero points", zero)):
        if int(values.min()) < 0 or int(values.max()) >= 2**bits:
            return Refusal(
                name,
                f"{label} from {int(values.min())} to {int(values.max())} beside {bits}-bit codes",
                "4-bit codes and zero points (0 to 15, or -8 to 7), or 8-bit ones (0 to 255, or -128 to 127)",
                "leave the layer in float, or quantize it to 4 or 8 bits",
            )
    if match.minimum is not None and bool(zero.any()):
        return Refusal(
            name, "both a zero point and a minimum", "one of the two", "fold the zero point into the minimum"
        )
    offset = zero if match.minimum is None else match.minimum
    grouping = find_groups(torch.cat([scale.double(), offset.double()]))
    if grouping.group_size % 8 and grouping.group_size != codes.shape[1]:
        return Refusal(
            name,
            f"scales that change every {grouping.group_size} inputs",
            "groups of a multiple of 8 inputs, or one group per output",
            "leave the layer in float, or quantize it with such a group size",
        )
    if grouping.permutation is not None:
        codes, zero, scale = (part[:, grouping.permutation] for part in (codes, zero, scale))
        offset = offset[:, grouping.permutation]
    first = grouping.first
    symmetric = match.minimum is None and bool((zero == 2 ** (bits - 1)).all())
    return QuantTensor(
        name,
        codes.to(torch.uint8).contiguous(),
        scale[:, first].contiguous(),
        grouping.group_size,
        None if symmetric or match.minimum is not None else zero[:, first].to(torch.uint8).contiguous(),
        None if match.minimum is None else offset[:, first].to(scale.dtype).contiguous(),
        grouping.permutation,
        bits,
    )
