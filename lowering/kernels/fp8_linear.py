"""``halfbyte::fp8_block_linear`` on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.lowering.kernels.fp8_kernels import FloatUnit, Fp8Gemm, Fp8Values
from halfbyte.lowering.kernels.generator import Kernel, render
from halfbyte.lowering.kernels.linear import Argument
from halfbyte.lowering.layout import up
from halfbyte.passes.ops import digit_block


@dataclass(frozen=True)
class Fp8Linear:
    """One shape of linear with e4m3 weights.

    Attributes:
        outputs, inputs: logical (N, K).
        block_inputs: inputs that share a scale; K for scales that span a row.
        io: dtype of x and y.
        bias: whether a bias is added.
        quantized: activations become e4m3.
        unit: what the CPU multiplies floats by.
        soft_f16: the CPU has no instruction that casts f16.
    """

    outputs: int
    inputs: int
    block_inputs: int
    io: str
    bias: bool
    quantized: bool
    unit: FloatUnit
    soft_f16: bool = False

    @property
    def _padded(self) -> int:
        return up(self.inputs, 8)

    @property
    def _blocks(self) -> int:
        return -(-self.inputs // self.block_inputs)

    @property
    def _planes(self) -> int:
        return self.unit.planes(self.io, self.quantized)

    @property
    def _row(self) -> int:
        """Inputs between the rows of values, off the multiples of 4096 bytes, as in lowering/layout.py."""
        return self._padded + 32 if self._padded % 128 == 0 else self._padded

    @property
    def _values(self) -> Fp8Values:
        return Fp8Values(self.io, self.quantized, self._planes, self.soft_f16)

    @property
    def _gemm(self) -> Fp8Gemm:
        return Fp8Gemm(self.unit, self._planes, self.io, self.bias, self.soft_f16)

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
        size = f"{self.outputs}x{self.inputs}_b{self.block_inputs}"
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
        columns = up(self.outputs, 64) // 64
        out = [
            Argument("codes", (columns, self._padded // 4, 4, 64), "i8"),
            Argument("scale", (columns, self._blocks, 64), "f32"),
        ]
        return tuple([*out, Argument("bias", (64 * columns,), "f32")] if self.bias else out)

    def text(self) -> str:
        """The ``util.func`` of this shape; the kernels it dispatches are separate (`kernels`)."""
        piece = digit_block(self.block_inputs, self.inputs)
        return render(
            "fp8_linear.mlir.j2",
            name=self.symbol,
            io=self.io,
            K=self.inputs,
            N=self.outputs,
            K_padded=self._padded,
            row=self._row,
            planes=self._planes,
            block=self.block_inputs if self._blocks > 1 else self._padded,
            piece=piece,
            pieces=-(-self.inputs // piece),
            pieces_per_block=self.block_inputs // piece if self._blocks > 1 else -(-self.inputs // piece),
            blocks=self._blocks,
            column_blocks=up(self.outputs, 64) // 64,
            weights=self.arguments,
            values=self._values.symbol,
            gemm=self._gemm.symbol,
        )
