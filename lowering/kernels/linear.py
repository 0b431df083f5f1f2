"""``halfbyte::linear`` and ``fused_linear``: their kernels and the function that strings them together."""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.lowering.kernels.codes import Codes
from halfbyte.lowering.kernels.generator import (
    Gemm,
    Glu,
    Kernel,
    Quantize,
    RmsNorm,
    render,
    weight_kind,
)
from halfbyte.lowering.kernels.isa import InstructionSet
from halfbyte.lowering.kernels.platform import CPU, Platform
from halfbyte.lowering.layout import Packing
from halfbyte.passes.ops.int8_roundings import FIXED
from halfbyte.passes.scheme import Activations, Zero


@dataclass(frozen=True)
class Argument:
    """One tensor of a packed weight as the function takes it.

    Attributes:
        name: codes, scale, zero, minimum, bias or colsum; norm or fixed of those that are no weight's.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def type(self) -> str:
        return f"tensor<{'x'.join(map(str, self.shape))}x{self.dtype}>"


@dataclass(frozen=True)
class Linear:
    """One shape of quantized linear.

    Attributes:
        isa: the GEMM's body.
        packing: shapes.
        io: dtype of x and y.
        scale: dtype of the weight scales.
        zero: how zero points are given.
        bias: whether a bias is added.
        activations: int8 by one of its roundings, fp8 or none (float).
        digits: digit planes of the float path.
        min_tokens: with quantized activations, fewer tokens than this take the float path; 0 for never.
        platform: the kind of device.
        norm: of x.
        glu: of the outputs, gate's and then up's.
        residual: whether the results are added to something.
    """

    isa: InstructionSet
    packing: Packing
    io: str
    scale: str
    zero: Zero
    bias: bool
    activations: Activations
    digits: int
    min_tokens: int
    platform: Platform = CPU
    norm: RmsNorm | None = None
    glu: Glu | None = None
    residual: bool = False

    @property
    def outputs(self) -> int:
        return self.packing.outputs // (2 if self.glu else 1)

    @property
    def inputs(self) -> int:
        return self.packing.inputs

    @property
    def modes(self) -> tuple[Codes, ...]:
        """What activations become on each path, the one for many tokens first."""
        planes, codes = Codes("planes", self.digits), Codes.of(self.activations, self.digits)
        if codes == planes:
            return (planes,)
        return (codes, planes) if self.min_tokens else (codes,)

    def _quantize(self, codes: Codes) -> Quantize:
        return Quantize(self.io, codes, self.platform, norm=self.norm)

    def _gemm(self, codes: Codes) -> Gemm:
        return Gemm(
            self.isa,
            self.io,
            codes,
            self.packing.bits,
            self.scale,
            self.zero,
            self.bias,
            self.platform,
            glu=self.glu,
            residual=self.residual,
            levels=self.packing.levels,
        )

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(
            kernel for digits in self.modes for kernel in (self._quantize(digits), self._gemm(digits))
        )

    @property
    def label(self) -> str:
        """The GEMMs of the layer, for reports."""
        return " / ".join(self._gemm(codes).symbol for codes in self.modes)

    @property
    def symbol(self) -> str:
        size = f"{self.packing.outputs}x{self.packing.inputs}_g{self.packing.group_size}"
        switch = f"_min{self.min_tokens}_{self.modes[1]}" if len(self.modes) == 2 else ""
        mode = f"{weight_kind(self.packing.bits, self.packing.levels)}_{self.modes[0]}"
        fused = [f"_{part}" for part in (self.norm, self.glu) if part] + ["_residual"] * self.residual
        rest = "".join(["_bias" * self.bias, switch, *fused])
        return f"halfbyte_linear_{mode}_{size}_{self.io}_{self.scale}_{self.zero.value}{rest}"

    @property
    def data(self) -> tuple[str, ...]:
        """Types of what the function takes before the weight's tensors."""
        residual = (self.result,) if self.residual else ()
        return (f"tensor<?x{self.inputs}x{self.io}>", *residual, *(argument.type for argument in self.more))

    @property
    def more(self) -> tuple[Argument, ...]:
        """Tensors between what is given row by row and the weight's."""
        norm = (Argument("norm", (self.inputs,), "f32"),) if self.norm else ()
        return (*norm, Argument("fixed", (len(FIXED),), "f32")) if self.modes[0].fixed else norm

    @property
    def result(self) -> str:
        """Type of what it gives."""
        return f"tensor<?x{self.outputs}x{self.io}>"

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The packed weight's tensors, in order."""
        out = [
            Argument("codes", self.packing.codes_shape, "i8"),
            Argument("scale", self.packing.group_shape, self.scale),
        ]
        if self.zero is Zero.INTEGER:
            out.append(Argument("zero", self.packing.group_shape, "i8"))
        if self.zero is Zero.MINIMUM:
            out.append(Argument("minimum", self.packing.group_shape, self.scale))
        if self.bias:
            out.append(Argument("bias", self.packing.bias_shape, "f32"))
        if self.modes[0].off_centre:  # what zero points of the activations are paid with
            out.append(Argument("colsum", self.packing.bias_shape, "f32"))
        return tuple(out)

    def text(self) -> str:
        """The ``util.func`` of this shape; the kernels it dispatches are separate (`kernels`)."""
        modes = [
            {
                "codes": codes,
                "digits": codes.digits,
                "row_scaled": codes.mode != "planes",
                "weights": [part for part in self.arguments if codes.off_centre or part.name != "colsum"],
                "block": self.packing.block(codes.mode),
                "quantize": self._quantize(codes).symbol,
                "gemm": self._gemm(codes).symbol,
            }
            for codes in self.modes
        ]
        return render(
            "linear.mlir.j2",
            name=self.symbol,
            packing=self.packing,
            K=self.packing.inputs,
            N=self.outputs,
            norm=self.norm is not None,
            fixed=self.modes[0].fixed,
            residual=self.residual,
            io=self.io,
            weights=self.arguments,
            modes=modes,
            min_tokens=self.min_tokens,
            device=self.platform.device,
        )
