"""``halfbyte::moe``: the routed experts of a mixture-of-experts layer, with int4 or int8 weights."""

from __future__ import annotations

import torch

from halfbyte.passes.ops.float32 import flush
from halfbyte.passes.ops.library import LIBRARY
from halfbyte.passes.ops.linear import linear
from halfbyte.passes.ops.swiglu import swiglu

LIBRARY.define(
    "moe(Tensor x, Tensor ids, Tensor weights, "
    "Tensor up_codes, Tensor up_scale, Tensor? up_zero, Tensor? up_minimum, Tensor? up_bias, "
    "Tensor down_codes, Tensor down_scale, Tensor? down_zero, Tensor? down_minimum, Tensor? down_bias, "
    "int bits, int up_group_size, int down_group_size, str activations, int digits, str glu, float limit) -> Tensor"
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
) -> torch.Tensor:
    """y[t] = sum over slots s of weights[t, s] * down_e(glu(gate_e(x[t]), up_e(x[t]))) with e = ids[t, s].

    gate_e, up_e and down_e are `linear`s with float32 results: x and the product of gate and up are each quantized
    as ``activations`` says, or cut into digit planes. `swiglu` defines the product. A slot's result is multiplied
    by its weight in float32, the slots of a token are added in their order, and the sum is cast to the dtype of x.
    A slot whose id is not an expert adds nothing. A token's result does not depend on the others'.

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

    Returns:
        [T, H] of the dtype of x.
    """
    experts, middle = up_codes.shape[0], up_codes.shape[1] // 2
    tokens, slots = ids.shape
    outputs = torch.zeros(tokens * slots, down_codes.shape[1], dtype=torch.float32)
    flat = ids.reshape(-1)
    for expert in range(experts):
        chosen = (flat == expert).nonzero().reshape(-1)
        if chosen.numel() == 0:
            continue
        zero, minimum, bias = (_of(expert, tensor) for tensor in (up_zero, up_minimum, up_bias))
        codes, scale = up_codes[expert], up_scale[expert]
        rows = x.float()[chosen // slots]
        both = linear(rows, codes, scale, zero, minimum, bias, bits, up_group_size, activations, digits, 0)
        rows = swiglu(both[:, :middle], both[:, middle:], glu, limit)
        zero, minimum, bias = (_of(expert, tensor) for tensor in (down_zero, down_minimum, down_bias))
        codes, scale = down_codes[expert], down_scale[expert]
        down = linear(rows, codes, scale, zero, minimum, bias, bits, down_group_size, activations, digits, 0)
        outputs[chosen] = flush(down * weights.float().reshape(-1)[chosen, None])
    total = torch.zeros(tokens, outputs.shape[1], dtype=torch.float32)
    for slot in range(slots):
        total = flush(total + outputs.reshape(tokens, slots, outputs.shape[1])[:, slot])
    return total.to(x.dtype)


def _of(expert: int, tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor[expert]


def _fake(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *rest: object,
) -> torch.Tensor:
    return torch.empty_like(x)


LIBRARY.impl("moe", moe, "CompositeExplicitAutograd")
torch.library.register_fake("halfbyte::moe", _fake, lib=LIBRARY)
