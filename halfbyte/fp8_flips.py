"""What may come of a product of gate and up that lies between two e4m3 codes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from halfbyte.passes.program import ExpertsSource, LayerSource
    from halfbyte.passes.weight import Fp8Tensor


def fp8_flips(
    source: ExpertsSource,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    glu: tuple[str, float],
    error: float,
) -> torch.Tensor:
    """How far ``halfbyte::fp8_block_moe`` with e4m3 activations may be from its reference, float64 [T, H].

    The sums of gate and up may be off by ``error`` of the largest of their row. That hardly moves their product, but
    one that lies that close to the middle of two codes may get the other one, and down's inputs are these codes.

    Args:
        source: the experts.
        x: [T, H].
        ids, weights: [T, k].
        glu: kind and limit of the product.
        error: of gate and up.
    """
    import torch

    from halfbyte.passes.ops.routed import routed
    from halfbyte.passes.ops.swiglu import swiglu

    def linear(rows: torch.Tensor, layer: LayerSource) -> torch.Tensor:
        weight, bias = _fp8(layer), None if layer.bias is None else layer.bias().float()
        blocks = (weight.block_outputs, weight.block_inputs)
        out: torch.Tensor = torch.ops.halfbyte.fp8_block_linear(
            rows, weight.bits, weight.scale, bias, *blocks, "fp8"
        )
        return out

    def compute(expert: int, rows: torch.Tensor) -> torch.Tensor:
        gate, up = linear(rows, source.gate(expert)), linear(rows, source.up(expert))
        product, down = swiglu(gate, up, *glu), _fp8(source.down(expert))
        off = error * (1.2 * gate.abs().amax(-1, keepdim=True) * (up.abs() + 1) + product.abs())
        off = off + error * up.abs().amax(-1, keepdim=True) * gate.abs()
        return _distance(product, off, down.block_inputs) @ down.dequantize().abs().T

    return routed(x.float(), ids, weights.abs(), source.experts, compute).nan_to_num(0.0).double()


def _distance(values: torch.Tensor, off: torch.Tensor, block: int) -> torch.Tensor:
    """Between the codes of values + off and values - off, in the scale of the values' block."""
    import torch

    from halfbyte.passes.ops.quantize_fp8 import quantize_fp8, round_e4m3

    out = []
    for part, slack in zip(values.split(block, -1), off.split(block, -1), strict=True):
        unit = quantize_fp8(part)[1].nan_to_num(0.0)[:, None]
        safe = torch.where(unit > 0, unit, torch.ones_like(unit))
        out.append((round_e4m3((part + slack) / safe) - round_e4m3((part - slack) / safe)).abs() * unit)
    return torch.cat(out, -1)


def _fp8(layer: LayerSource) -> Fp8Tensor:
    from halfbyte.passes.weight import Fp8Tensor

    weight = layer.weight()
    assert isinstance(weight, Fp8Tensor)
    return weight
