"""The integer linears of a program: which kernels an operator's operands and settings ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from halfbyte.lowering.imported_values import Shaped, constant, is_none
from halfbyte.lowering.kernels.generator import Glu, RmsNorm
from halfbyte.lowering.kernels.linear import Linear
from halfbyte.lowering.layout import Packing
from halfbyte.lowering.targets.target import Target
from halfbyte.passes.levels import Levels
from halfbyte.passes.scheme import Activations, Zero


@dataclass(frozen=True)
class LinearCall:
    """One ``halfbyte::linear`` or ``halfbyte::fused_linear``.

    Attributes:
        linear: its kernels.
        weight: codes, scale, zero, minimum, values of the torch dialect, None where there is none.
        bias: the same.
        given: what its function takes before the weight's tensors.
    """

    linear: Linear
    weight: tuple[Any, ...]
    bias: Any
    given: tuple[Any, ...]


def linear_call(target: Target, op: Any) -> LinearCall:
    x, codes, scale, zero, minimum, bias, *settings, levels, fixed = op.operands
    bits, group_size, activations, digits, min_tokens = map(constant, settings[:5])
    norm, glu, residual, given = None, None, False, [x]
    if len(settings) > 5:  # a fused one
        weight, eps, plus_one, product, beside = settings[5:]
        residual = not is_none(beside)
        glu = Glu(constant(product)) if constant(product) else None
        norm = None if is_none(weight) else RmsNorm(constant(eps), bool(constant(plus_one)))
        given += [value for value in (beside, weight) if not is_none(value)]
    given += [] if is_none(fixed) else [fixed]
    shaped, (outputs, _) = Shaped.of(x), Shaped.of(codes).shape
    inputs = shaped.shape[-1]
    assert inputs is not None and outputs is not None
    linear = Linear(
        target.isa,
        Packing(outputs, inputs, group_size, bits, Levels(constant(levels))),
        shaped.dtype,
        Shaped.of(scale).dtype,
        Zero.MINIMUM if not is_none(minimum) else Zero.SYMMETRIC if is_none(zero) else Zero.INTEGER,
        not is_none(bias),
        Activations(activations),
        digits,
        min_tokens,
        target.platform,
        norm,
        glu,
        residual,
    )
    parts = tuple(None if is_none(part) else part for part in (codes, scale, zero, minimum, bias))
    return LinearCall(linear, parts[:4], parts[4], tuple(given))
