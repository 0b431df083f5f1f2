"""The operators of experts in an imported module: which kernels compute them, and whose weights they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from halfbyte.lowering.imported_values import Shaped, constant, is_none
from halfbyte.lowering.kernels.fp8_moe import Fp8ExpertLinear, Fp8Moe
from halfbyte.lowering.kernels.fp8_packing import Fp8Packing
from halfbyte.lowering.kernels.generator import Glu
from halfbyte.lowering.kernels.moe import ExpertLinear, Moe
from halfbyte.lowering.layout import Packing
from halfbyte.lowering.targets.target import Target
from halfbyte.passes.levels import Levels
from halfbyte.passes.program import ExpertsSource
from halfbyte.passes.scheme import Activations, Zero
from halfbyte.passes.stacked_experts import Parts, fp8_stacked_source, stacked_source


@dataclass(frozen=True)
class ExpertsCall:
    """One use of an operator of experts.

    Attributes:
        kernels: what computes it.
        up, down: the operands that are the experts' tensors, codes first.
        own: the source of experts whose tensors are a graph's own state, from their name and the values of up and down.
        activations: what happens to the inputs of the linears.
    """

    kernels: Moe | Fp8Moe
    up: Sequence[Any]
    down: Sequence[Any]
    own: Callable[[str, Parts, Parts], ExpertsSource]
    activations: Activations


def moe_call(target: Target, op: Any) -> ExpertsCall:
    """Of ``halfbyte::moe``."""
    x, ids, _, *rest = op.operands
    up, down, settings = rest[:5], rest[5:10], rest[10:]
    bits, up_group, down_group, activations, digits, glu, limit, named = map(constant, settings)
    levels = Levels(named)
    experts, inner, hidden, slots = _shape(x, ids, up[0])
    moe = Moe(
        isa=target.isa,
        experts=experts,
        slots=slots,
        up=_linear("up", up, Packing(inner, hidden, up_group, bits, levels)),
        down=_linear("down", down, Packing(hidden, inner, down_group, bits, levels)),
        io=Shaped.of(x).dtype,
        activations=Activations(activations),
        digits=digits,
        glu=Glu(glu, limit),
        platform=target.platform,
    )

    def own(name: str, up: Parts, down: Parts) -> ExpertsSource:
        return stacked_source(name, up, down, (hidden, inner), (up_group, down_group), bits, levels)

    return ExpertsCall(moe, up, down, own, Activations(activations))


def fp8_block_moe_call(target: Target, op: Any) -> ExpertsCall:
    """Of ``halfbyte::fp8_block_moe``."""
    x, ids, _, *rest = op.operands
    up, down, settings = rest[:3], rest[3:6], rest[6:]
    *blocks, activations, glu, limit = (constant(value) for value in settings)
    experts, inner, hidden, slots = _shape(x, ids, up[0])
    moe = Fp8Moe(
        unit=target.float_unit,
        experts=experts,
        slots=slots,
        up=Fp8ExpertLinear("up", Fp8Packing(inner, hidden, blocks[1]), not is_none(up[2])),
        down=Fp8ExpertLinear("down", Fp8Packing(hidden, inner, blocks[3]), not is_none(down[2])),
        io=Shaped.of(x).dtype,
        quantized=activations == "fp8",
        glu=Glu(glu, limit),
        platform=target.platform,
    )

    def own(name: str, up: Parts, down: Parts) -> ExpertsSource:
        return fp8_stacked_source(name, up, down, ((blocks[0], blocks[1]), (blocks[2], blocks[3])))

    return ExpertsCall(moe, up, down, own, Activations(activations))


def _shape(x: Any, ids: Any, up_codes: Any) -> tuple[int, int, int, int]:
    """E, I, H and k."""
    experts, both, *_ = Shaped.of(up_codes).shape
    hidden, slots = Shaped.of(x).shape[-1], Shaped.of(ids).shape[-1]
    assert experts is not None and both is not None and hidden is not None and slots is not None
    return experts, both // 2, hidden, slots


def _linear(kind: Literal["up", "down"], parts: Sequence[Any], packing: Packing) -> ExpertLinear:
    _, scale, zero, minimum, bias = parts
    known = Zero.MINIMUM if not is_none(minimum) else Zero.SYMMETRIC if is_none(zero) else Zero.INTEGER
    return ExpertLinear(kind, packing, not is_none(bias), Shaped.of(scale).dtype, known)
