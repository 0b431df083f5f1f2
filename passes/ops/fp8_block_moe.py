"""``halfbyte::fp8_block_moe``: the routed experts of a mixture-of-experts layer, with e4m3 weights."""

from __future__ import annotations

import torch

from halfbyte.passes.ops.fp8_block_linear import fp8_block_linear
from halfbyte.passes.ops.library import LIBRARY
from halfbyte.passes.ops.routed import of_expert, routed
from halfbyte.passes.ops.swiglu import swiglu

LIBRARY.define(
    "fp8_block_moe(Tensor x, Tensor ids, Tensor weights, Tensor up_codes, Tensor up_scale, Tensor? up_bias, "
    "Tensor down_codes, Tensor down_scale, Tensor? down_bias, int up_block_outputs, int up_block_inputs, "
    "int down_block_outputs, int down_block_inputs, str activations, str glu, float limit) -> Tensor"
)


def fp8_block_moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    up_codes: torch.Tensor,
    up_scale: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_codes: torch.Tensor,
    down_scale: torch.Tensor,
    down_bias: torch.Tensor | None,
    up_block_outputs: int,
    up_block_inputs: int,
    down_block_outputs: int,
    down_block_inputs: int,
    activations: str,
    glu: str,
    limit: float,
) -> torch.Tensor:
    """y[t] = sum over slots s of weights[t, s] * down_e(glu(gate_e(x[t]), up_e(x[t]))) with e = ids[t, s].

    gate_e, up_e and down_e are `fp8_block_linear`s with float32 results, `swiglu` defines the product, `routed` the
    sum. Lowerings agree as those of `fp8_block_linear` do; but where the product is quantized to e4m3, a value that
    lies between two codes to within the error of its linears may get the other one. A token's result does not
    depend on the others'.

    Args:
        x: float32, float16 or bfloat16 [T, H]; T may be 0.
        ids: int64 [T, k], the experts of each token.
        weights: float [T, k], read as float32.
        up_codes: uint8 [E, 2 I, H], the bits of e4m3 values; gate's I rows, then up's; no NaN.
        up_scale: float [E, 2 ceil(I / up_block_outputs), ceil(H / up_block_inputs)]: gate's blocks, then up's.
        up_bias: float [E, 2 I] or None.
        down_codes: uint8 [E, H, I].
        down_scale: float [E, ceil(H / down_block_outputs), ceil(I / down_block_inputs)].
        down_bias: float [E, H] or None; it is added before the slot's weight.
        up_block_outputs, up_block_inputs, down_block_outputs, down_block_inputs: as for `fp8_block_linear`.
        activations: ``fp8`` or ``none``, as for `fp8_block_linear`.
        glu: ``silu``, or ``oai`` with ``limit``.
        limit: of gate and up where glu is ``oai``.

    Returns:
        [T, H] of the dtype of x.
    """
    middle, blocks = up_codes.shape[1] // 2, up_scale.shape[1] // 2

    def compute(expert: int, rows: torch.Tensor) -> torch.Tensor:
        codes, scale, bias = up_codes[expert], up_scale[expert], of_expert(expert, up_bias)
        gate, up = (
            fp8_block_linear(
                rows,
                codes[first * middle :][:middle],
                scale[first * blocks :][:blocks],
                None if bias is None else bias[first * middle :][:middle],
                up_block_outputs,
                up_block_inputs,
                activations,
            )
            for first in (0, 1)
        )
        product, bias = swiglu(gate, up, glu, limit), of_expert(expert, down_bias)
        block = (down_block_outputs, down_block_inputs)
        return fp8_block_linear(product, down_codes[expert], down_scale[expert], bias, *block, activations)

    return routed(x, ids, weights, up_codes.shape[0], compute)


def _fake(x: torch.Tensor, *rest: object) -> torch.Tensor:
    return torch.empty_like(x)


LIBRARY.impl("fp8_block_moe", fp8_block_moe, "CompositeExplicitAutograd")
torch.library.register_fake("halfbyte::fp8_block_moe", _fake, lib=LIBRARY)
