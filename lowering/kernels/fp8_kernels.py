"""The kernels of linears with e4m3 weights, by the unit that multiplies floats."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from halfbyte.lowering.kernels.generator import ROW_BLOCK, Glu, render
from halfbyte.lowering.kernels.platform import CPU, Platform


class FloatUnit(Enum):
    """What a CPU multiplies floats by, the best first: which of its features that takes."""

    TILES = frozenset({"avx512f", "avx512bw", "avx512bf16", "amx-tile", "amx-bf16"})
    DOTS = frozenset({"avx512f", "avx512bw", "avx512bf16"})
    WIDE = frozenset({"avx512f"})
    NARROW = frozenset[str]()

    @classmethod
    def of(cls, features: frozenset[str]) -> FloatUnit:
        """The best unit of a CPU with these features (LLVM's names)."""
        return next(unit for unit in cls if unit.value <= features)

    @property
    def pairs(self) -> bool:
        """Whether it multiplies pairs of bf16."""
        return self in (FloatUnit.TILES, FloatUnit.DOTS)

    def planes(self, io: str, quantized: bool) -> int:
        """bf16 planes that hold an activation exactly; 0 where the unit takes float32."""
        if not self.pairs:
            return 0
        return 1 if quantized else {"bf16": 1, "f16": 2, "f32": 3}[io]


@dataclass(frozen=True)
class Fp8Values:
    """``fp8_values.mlir.j2``: the activation side.

    Attributes:
        io: dtype of x.
        quantized: to e4m3; else x stays float.
        planes: of bf16 that the values are cut into, or 0 for float32.
        platform: the kind of device.
        slots: rows are those of the tokens that a list of slots names.
    """

    io: str
    quantized: bool
    planes: int
    platform: Platform = CPU
    slots: bool = False

    @property
    def _mode(self) -> str:
        return "e4m3" if self.quantized else "float"

    @property
    def symbol(self) -> str:
        planes = f"_planes{self.planes}" if self.planes else ""
        kind = "_slots" if self.slots else ""
        return f"halfbyte_values{kind}_{self._mode}{planes}_{self.io}{self.platform.suffix(self.io)}"

    def text(self) -> str:
        return render(
            self.platform.template("fp8_values"),
            name=self.symbol,
            io=self.io,
            mode=self._mode,
            planes=self.planes,
            **self.platform.values,
            slots=self.slots,
            norm=None,
        )


@dataclass(frozen=True)
class Fp8Gemm:
    """``fp8_dots.mlir.j2`` or, where bf16 has no unit, ``fp8_gemm.mlir.j2``.

    Attributes:
        unit: what multiplies.
        planes: of the values, see `Fp8Values`.
        io: dtype of the result.
        bias: whether a bias is added.
        platform: the kind of device.
        experts: None, or which linear of experts it is: ``up`` (gate and up) or ``down``.
        glu: of ``up``.
    """

    unit: FloatUnit
    planes: int
    io: str
    bias: bool
    platform: Platform = CPU
    experts: Literal["up", "down"] | None = None
    glu: Glu | None = None

    @property
    def symbol(self) -> str:
        planes = f"_planes{self.planes}" if self.planes else ""
        rest = ("_bias" if self.bias else "") + self.platform.suffix(self.io)
        experts = f"{self.experts}_{f'{self.glu}_' if self.glu else ''}" if self.experts else ""
        return f"halfbyte_gemm_{experts}fp8{planes}_{self.unit.name.lower()}_{self.io}{rest}"

    def text(self) -> str:
        values: dict[str, Any] = dict(
            name=self.symbol,
            io=self.io,
            bias=self.bias,
            **self.platform.values,
            row_block=ROW_BLOCK,
            experts=self.experts,
            glu=self.glu.kind if self.glu else None,
            glu_bits=self.glu.bits if self.glu else {},
            residual=False,
        )
        if self.platform.is_gpu:
            rows = 4
            # What gemm_parts.mlir.j2 asks about integer weights.
            values |= {"mode": "planes", "digits": 1, "zero": "symmetric", "scale": "f32"}
            values |= {"bits": 8, "table": None, "middle": 128, "off_centre": False}
            values |= {"few_rows": 0, "few_columns": 64, "rows_per_thread": rows, "tile_rows": 4 * rows}
            return render(self.platform.template("fp8_gemm"), **values, lanes=1)
        if self.unit.pairs:
            tiles = self.unit is FloatUnit.TILES
            return render(
                "fp8_dots.mlir.j2",
                **values,
                **_E4M3_TABLES,
                columns=64,
                heights=(4, 2, 1) if self.planes == 1 else (2, 1),
                planes=self.planes,
                panel=ROW_BLOCK if tiles else 48,
                tiles=tiles,
            )
        return render("fp8_gemm.mlir.j2", **values, **_TILES[self.unit], panel=48)


# Of fp8_gemm.mlir.j2: columns of a tile by its rows, the highest first; rows from which the panel form is faster.
_TILES: dict[FloatUnit, dict[str, Any]] = {
    FloatUnit.WIDE: {"widths": {6: 64, 4: 64, 2: 64, 1: 64}, "least_panel": 8},
    FloatUnit.NARROW: {"widths": {4: 16, 2: 32, 1: 64}, "least_panel": 3},
}


def _e4m3_tables() -> dict[str, list[int]]:
    """Bytes of the bf16 that is an e4m3 value over 256.

    ``normal_high`` by exponent; the low byte of a normal value is its last four bits, moved up.
    ``small_high``, ``small_low`` by the last bits of a value with exponent 0: count * 2^-17.
    """
    small = [0] * 16
    for count in range(1, 8):
        top = count.bit_length() - 1
        small[count] = (110 + top) << 7 | (count << 7 >> top) & 127
    return {
        "normal_high": [(exponent + 112) >> 1 for exponent in range(16)],
        "small_high": [bits >> 8 for bits in small],
        "small_low": [bits & 255 for bits in small],
    }


_E4M3_TABLES = _e4m3_tables()
