"""``halfbyte::head_linear``: its kernel, by vector unit of a CPU, and of GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.lowering.kernels.attention import PLAIN, VectorUnit
from halfbyte.lowering.kernels.generator import render
from halfbyte.lowering.kernels.platform import CPU, Platform
from halfbyte.passes.ops.attention_caches import padded_width

# Rows of a workgroup in float32, on its stack.
_BLOCK_BYTES = 48 << 10
_GPU_ROWS = 4


@dataclass(frozen=True)
class HeadLinear:
    """``head_linear.mlir.j2``.

    Attributes:
        inputs, outputs: of a head.
        kept: columns of a head that stay as they are, behind the others.
        io: dtype of rows and results.
        weight: dtype of the weights.
        one_token: a kernel for calls of one token.
        unit: what multiplies, on a CPU.
        platform: the kind of device.
    """

    inputs: int
    outputs: int
    kept: int
    io: str
    weight: str
    one_token: bool = False
    unit: VectorUnit = PLAIN
    platform: Platform = CPU

    @property
    def symbol(self) -> str:
        kind = f"{'_one' * self.one_token}_{self.inputs}x{self.outputs}and{self.kept}"
        unit = "" if self.platform.is_gpu else f"_{self.unit.name}"
        return f"halfbyte_head_linear{kind}{unit}_{self.io}_{self.weight}{self.platform.suffix(self.io, self.weight)}"

    def text(self) -> str:
        lanes, padded = self.unit.lanes, padded_width(self.outputs)
        columns = padded if self.outputs % lanes else self.outputs
        rows = 1 if self.one_token else _GPU_ROWS if self.platform.is_gpu else self.unit.rows
        abreast = 8 if self.one_token else self.unit.columns
        tiles = [
            {"start": start, "end": end, "vectors": vectors}
            for start, end, vectors in _tiles(columns // lanes, abreast, lanes)
        ]
        return render(
            self.platform.template("head_linear"),
            name=self.symbol,
            K=self.inputs,
            N=self.outputs,
            P=padded,
            kept=self.kept,
            kept_step=next(n for n in (16, 8, 4, 2, 1) if self.kept % n == 0),
            io=self.io,
            weight=self.weight,
            unit=self.unit,
            rows=rows,
            row_block=max(1, _BLOCK_BYTES // (4 * self.inputs) // rows) * rows,
            tiles=tiles,
            step=next(n for n in (4, 2, 1) if self.inputs % n == 0),
            **self.platform.values,
        )


def _tiles(vectors: int, abreast: int, lanes: int) -> list[tuple[int, int, int]]:
    """First column, end, and vectors of each tile, of two runs of tiles: ``abreast`` vectors each, and the rest."""
    whole = vectors // abreast * abreast
    runs = [(0, whole, abreast), (whole, vectors, vectors - whole)]
    return [(lanes * start, lanes * end, count) for start, end, count in runs if end > start]
