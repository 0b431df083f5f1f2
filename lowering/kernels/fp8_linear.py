"""``halfbyte::fp8_block_linear``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from halfbyte.lowering.kernels.fp8_kernels import FloatUnit, Fp8Gemm, Fp8Values
from halfbyte.lowering.kernels.fp8_packing import Fp8Packing
from halfbyte.lowering.kernels.generator import Kernel, render
from halfbyte.lowering.kernels.linear import Argument
from halfbyte.lowering.kernels.platform import CPU, Platform


@dataclass(frozen=True)
class Fp8Linear:
    """One shape of linear with e4m3 weights.

    Attributes:
        packing: shapes.
        io: dtype of x and y.
        bias: whether a bias is added.
        quantized: activations become e4m3.
        unit: what the CPU multiplies floats by.
        platform: the kind of device.
    """

    packing: Fp8Packing
    io: str
    bias: bool
    quantized: bool
    unit: FloatUnit
    platform: Platform = CPU

    more: ClassVar[tuple[Argument, ...]] = ()  # as of `Linear`

    @property
    def outputs(self) -> int:
        return self.packing.outputs

    @property
    def inputs(self) -> int:
        return self.packing.inputs

    @property
    def _planes(self) -> int:
        return self.unit.planes(self.io, self.quantized)

    @property
    def _values(self) -> Fp8Values:
        return Fp8Values(self.io, self.quantized, self._planes, self.platform)

    @property
    def _gemm(self) -> Fp8Gemm:
        return Fp8Gemm(self.unit, self._planes, self.io, self.bias, self.platform)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return (self._values, self._gemm)

    @property
    def label(self) -> str:
        """The GEMM, for reports."""
        return self._gemm.symbol

    @property
    def symbol(self) -> str:
        mode = "wfp8_afp8" if self.quantized else "wfp8_a16"
        size = f"{self.outputs}x{self.inputs}_b{self.packing.block_inputs}"
        return f"halfbyte_linear_{mode}_{size}_{self.io}{'_bias' if self.bias else ''}"

    @property
    def data(self) -> tuple[str, ...]:
        """Types of what the function takes before the weight's tensors."""
        return (f"tensor<?x{self.inputs}x{self.io}>",)

    @property
    def result(self) -> str:
        """Type of what it gives."""
        return f"tensor<?x{self.outputs}x{self.io}>"

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The packed weight's tensors, in order."""
        out = [
            Argument("codes", self.packing.codes_shape, "i8"),
            Argument("scale", self.packing.scale_shape, "f32"),
        ]
        bias = Argument("bias", (64 * self.packing.column_blocks,), "f32")
        return (*out, bias) if self.bias else tuple(out)

    def text(self) -> str:
        """The ``util.func`` of this shape; the kernels it dispatches are separate (`kernels`)."""
        return render(
            "fp8_linear.mlir.j2",
            name=self.symbol,
            io=self.io,
            K=self.inputs,
            N=self.outputs,
            packing=self.packing,
            planes=self._planes,
            weights=self.arguments,
            values=self._values.symbol,
            gemm=self._gemm.symbol,
            device=self.platform.device,
        )
