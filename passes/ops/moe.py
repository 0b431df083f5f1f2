"""``halfbyte::moe``: the routed experts of a mixture-of-experts layer, with int4 or int8 weights."""

from __future__ import annotations

from typing import Any

import torch

from halfbyte.passes.ops.library import LIBRARY
from halfbyte.passes.ops.linear import check_levels, linear
from halfbyte.passes.ops.routed import of_expert, routed
from halfbyte.passes.ops.swiglu import swiglu

_Parts = tuple[torch.Tensor | None, ...]

LIBRARY.define(
    "moe(Tensor x, Tensor ids, Tensor weights, "
    "Tensor up_codes, Tensor up_scale, Tensor? up_zero, Tensor? up_minimum, Tensor? up_bias, "
    "Tensor down_codes, Tensor down_scale, Tensor? down_zero, Tensor? down_minimum, Tensor? down_bias, "
    "int bits, int up_group_size, int down_group_size, str activations, int digits, str glu, float limit, "
    'str levels="integers") -> Tensor'
)


def moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    up_codes: torch.Tensor,
    up_scale: torch.Tensor,
    up_zero: torch.Tensor | None,
    up_minimum: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    down_codes: torch.Tensor,
    down_scale: torch.Tensor,
    down_zero: torch.Tensor | None,
    down_minimum: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    bits: int,
    up_group_size: int,
    down_group_size: int,
    activations: str,
    digits: int,
    glu: str,
    limit: float,
    levels: str = "integers",
) -> torch.Tensor:
    """y[t] = sum over slots s of weights[t, s] * down_e(glu(gate_e(x[t]), up_e(x[t]))) with e = ids[t, s].

    gate_e, up_e and down_e are `linear`s with float32 results: x and the product of gate and up are each quantized
    as ``activations`` says, or cut into digit planes. `swiglu` defines the product, `routed` the sum. A token's
    result does not depend on the others'.

    Args:
        x: float32, float16 or bfloat16 [T, H]; T may be 0.
        ids: int64 [T, k], the experts of each token.
        weights: float [T, k], read as float32.
        up_codes: uint8 [E, 2 I, ceil(H / 2)] ([E, 2 I, H] where ``bits`` is 8): gate's I rows, then up's.
        up_scale: float32, float16 or bfloat16 [E, 2 I, ceil(H / up_group_size)].
        up_zero, up_minimum: as for `linear`, [E, 2 I, groups], or None.
        up_bias: float [E, 2 I] or None.
        down_codes: uint8 [E, H, ceil(I / 2)] or [E, H, I].
        down_scale, down_zero, down_minimum: [E, H, ceil(I / down_group_size)].
        down_bias: float [E, H] or None; it is added before the slot's weight.
        bits: of the codes, 4 or 8.
        up_group_size, down_group_size: inputs per group.
        activations: ``int8``, ``fp8`` or ``none``, as for `linear`.
        digits: digit planes of float activations, 2 or 3.
        glu: ``silu``, or ``oai`` with ``limit``.
        limit: of gate and up where glu is ``oai``.
        levels: what codes stand for, as for `linear`.

    Returns:
        [T, H] of the dtype of x.
    """
    middle = up_codes.shape[1] // 2
    up = (up_codes, up_scale, up_zero, up_minimum, up_bias)
    down = (down_codes, down_scale, down_zero, down_minimum, down_bias)

    def side(rows: torch.Tensor, expert: int, parts: _Parts, group_size: int) -> torch.Tensor:
        codes, scale, zero, minimum, bias = (of_expert(expert, part) for part in parts)
        assert codes is not None and scale is not None
        settings = (bits, group_size, activations, digits, 0, levels)
        return linear(rows, codes, scale, zero, minimum, bias, *settings)

    def compute(expert: int, rows: torch.Tensor) -> torch.Tensor:
        both = side(rows, expert, up, up_group_size)
        product = swiglu(both[:, :middle], both[:, middle:], glu, limit)
        return side(product, expert, down, down_group_size)

    return routed(x, ids, weights, up_codes.shape[0], compute)


def _fake(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *rest: Any,
) -> torch.Tensor:
    bits, _, _, activations, _, _, _, *levels = rest[10:]
    torch._check(
        activations in ("int8", "fp8", "none"),
        lambda: f"activations of experts must be int8, fp8 or none, not {activations!r}",
    )
    offset = any(rest[at] is not None for at in (2, 3, 7, 8))
    check_levels(levels[0] if levels else "integers", bits, offset, activations)
    return torch.empty_like(x)


LIBRARY.impl("moe", moe, "CompositeExplicitAutograd")
torch.library.register_fake("halfbyte::moe", _fake, lib=LIBRARY)
