"""``halfbyte::rms_norm`` and ``rms_norm_merged``: norms by themselves."""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.lowering.kernels.generator import RmsNorm, render
from halfbyte.lowering.kernels.platform import CPU, Platform

# Of a workgroup on a CPU: less than that is done sooner than a worker wakes up.
_VALUES = 16384
# Norms of so many values share a workgroup of a GPU.
_NARROW = 256


@dataclass(frozen=True)
class Normalize:
    """``rms_norm.mlir.j2``.

    Attributes:
        norm: eps and what the weight is.
        width: values that are normed together.
        io: dtype of rows and results.
        weight: its dtype, or None for a norm without one.
        rounds: what is normed is rounded to io before the weight multiplies it.
        platform: the kind of device.
    """

    norm: RmsNorm
    width: int
    io: str
    weight: str | None = "f32"
    rounds: bool = False
    platform: Platform = CPU

    @property
    def symbol(self) -> str:
        kind = f"{self.width}_{self.io}_{self.weight or 'unweighted'}{'_rounds' * self.rounds}"
        return f"halfbyte_rms_{self.norm}_{kind}{self.platform.suffix(self.io, self.weight or '')}"

    def text(self) -> str:
        return render(
            self.platform.template("rms_norm"),
            name=self.symbol,
            norm=self.norm,
            width=self.width,
            io=self.io,
            weight=self.weight,
            rounds=self.rounds,
            **(self._of_threads if self.platform.is_gpu else {}),
            **self.platform.values,
        )

    @property
    def _of_threads(self) -> dict[str, object]:
        together = 16 if self.width <= _NARROW else 1
        return {"together": together, "lanes": 256 // together}


@dataclass(frozen=True)
class NormalizedRows:
    """``rms_norm_rows.mlir.j2``: the function that norms columns of rows.

    Attributes:
        kernel: what it dispatches.
        columns: of a row.
        first: the column where what is normed begins.
        heads: how often ``kernel.width`` columns are normed.
    """

    kernel: Normalize
    columns: int
    first: int = 0
    heads: int = 1

    @property
    def outputs(self) -> int:
        return self.heads * self.kernel.width

    @property
    def symbol(self) -> str:
        return f"{self.kernel.symbol}_h{self.heads}_at{self.first}of{self.columns}"

    def text(self) -> str:
        return render(
            "rms_norm_rows.mlir.j2",
            name=self.symbol,
            kernel=self.kernel.symbol,
            N=self.columns,
            first=self.first,
            heads=self.heads,
            width=self.kernel.width,
            rows=max(1, _VALUES // max(1, self.outputs)),
            io=self.kernel.io,
            weight=self.kernel.weight,
            device=self.kernel.platform.device,
        )
