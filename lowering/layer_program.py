"""A program with one function per quantized layer of a bundle, for comparing layers one by one.

It is made of the same kernels, for the same target, and reads the bundle's own archive.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from halfbyte.lowering.kernels.fp8_linear import Fp8Linear
from halfbyte.lowering.kernels.fp8_moe import Fp8Moe
from halfbyte.lowering.kernels.linear import Linear
from halfbyte.lowering.kernels.moe import Moe
from halfbyte.lowering.parameters import TensorSpec
from halfbyte.lowering.splice import SCOPE
from halfbyte.passes.ops.int8_roundings import FIXED


@dataclass(frozen=True)
class ArchivedLayer:
    """A packed linear of an archive.

    Attributes:
        name: its name there; merged layers have one.
        linear: its kernels.
        members: the layers it was merged from, in column order.
        fixed: the archive's name of what ``int8_fixed`` rounds with; None where that is given with the rows.
    """

    name: str
    linear: Linear | Fp8Linear | Moe | Fp8Moe
    members: tuple[str, ...] = ()
    fixed: str | None = None

    @property
    def outputs(self) -> int:
        return self.linear.outputs

    @property
    def inputs(self) -> int:
        return self.linear.inputs

    @property
    def function(self) -> str:
        return "layer_" + "".join(c if c.isalnum() else "_" for c in self.name)


def layer_program(layers: Iterable[ArchivedLayer]) -> str:
    """MLIR with ``@layer_<name>(x: [M, K]) -> [M, N]`` for every layer; experts also take ids and weights [M, k].

    A linear that rounds with what the archive does not hold takes it last.
    """
    parts: dict[str, str] = {}
    for layer in layers:
        linear = layer.linear
        for kernel in linear.kernels:
            parts.setdefault(kernel.symbol, kernel.text())
        parts.setdefault(linear.symbol, linear.text())
        held = [] if layer.fixed is None else [TensorSpec(layer.fixed, (len(FIXED),), "f32")]
        specs = held + [TensorSpec(f"{layer.name}.{a.name}", a.shape, a.dtype) for a in linear.arguments]
        for spec in specs:
            named = f'#flow.parameter.named<"{SCOPE}"::"{spec.key}">'
            parts[spec.key] = f'util.global private @"{spec.key}" = {named} : {spec.type}'
        y, data = linear.result, linear.data[: len(linear.data) - len(held)]
        loads = "\n".join(
            f'  %w{i} = util.global.load immutable @"{spec.key}" : {spec.type}'
            for i, spec in enumerate(specs)
        )
        names = [f"%x{i}" for i in range(len(data))]
        operands = ", ".join([*names, *(f"%w{i}" for i in range(len(specs)))])
        types = ", ".join([*data, *(spec.type for spec in specs)])
        given = ", ".join(f"{name}: {kind}" for name, kind in zip(names, data, strict=True))
        parts[layer.function] = (
            f"func.func @{layer.function}({given}) -> {y} {{\n{loads}\n"
            f"  %y = util.call @{linear.symbol}({operands}) : ({types}) -> {y}\n  return %y : {y}\n}}"
        )
    return "module {\n" + "\n".join(parts.values()) + "\n}\n"
