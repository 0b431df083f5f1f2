"""From a kernel's specialised values to its text. Symbol names carry every value, so equal kernels are one kernel."""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import jinja2

from halfbyte.lowering.kernels.codes import Codes
from halfbyte.lowering.kernels.isa import THREADS, InstructionSet
from halfbyte.lowering.kernels.platform import CPU, VULKAN_MMA, Platform
from halfbyte.passes.levels import Levels
from halfbyte.passes.ops import swiglu
from halfbyte.passes.ops.int8_roundings import ROUNDINGS
from halfbyte.passes.scheme import Zero
from halfbyte.passes.weight import FLOAT_DTYPES

# Block tags are {! !} because {% is MLIR.
_TEMPLATES = Path(__file__).with_name("templates")
ROW_BLOCK = 96
# That fit the shared memory of a GPU when they are sorted.
MOST_EXPERTS = 1024
# Rows whose sums wait in the panel form's scratch; it and 8 KiB of unpacked weights fit a stack of 32 KiB.
_PANEL_ROWS = {1: 48, 2: 96, 3: 96}


class Kernel(Protocol):
    """A dispatch that can be written out."""

    @property
    def symbol(self) -> str: ...

    def text(self) -> str: ...


@dataclass(frozen=True)
class RmsNorm:
    """A norm of what is quantized, see ``passes/ops/rms_norm.py``."""

    eps: float
    plus_one: bool

    @property
    def eps_bits(self) -> int:
        return _float_bits(self.eps)

    def __str__(self) -> str:
        return f"norm{self.eps_bits:08x}{'_plus1' if self.plus_one else ''}"


@dataclass(frozen=True)
class Quantize:
    """``quantize.mlir.j2``: the activation side.

    Attributes:
        io: ``f32``, ``f16`` or ``bf16``.
        codes: what x becomes.
        platform: the kind of device.
        slots: rows are those of the tokens that a list of slots names.
        norm: of x, which is float32 then.
    """

    io: str
    codes: Codes
    platform: Platform = CPU
    slots: bool = False
    norm: RmsNorm | None = None

    @property
    def symbol(self) -> str:
        kind = f"_{self.norm}" if self.norm else "_slots" if self.slots else ""
        return f"halfbyte_quantize{kind}_{self.codes}_{self.io}{self.platform.suffix(self.io)}"

    def text(self) -> str:
        return render(
            self.platform.template("quantize"),
            name=self.symbol,
            io=self.io,
            mode=self.codes.mode,
            digits=self.codes.digits,
            off_centre=self.codes.off_centre,
            fixed=self.codes.fixed,
            rounding=self._rounding,
            **self.platform.values,
            slots=self.slots,
            norm=self.norm,
        )

    @property
    def _rounding(self) -> dict[str, object] | None:
        """How scales are chosen, where not as ``quantize_per_token`` does; numbers as the bits of float32."""
        known = ROUNDINGS.get(self.codes.rounding) if self.codes.mode == "int8" else None
        if known is None:
            return None
        return {
            "divisor": _float_bits(known.divisor),
            "least": _float_bits(known.least_scale(FLOAT_DTYPES[self.io])),
            "narrow": known.narrow and self.io != "f32",
            "double": known.double,
        }


@dataclass(frozen=True)
class Glu:
    """The product of gate and up, see ``passes/ops/swiglu.py``: ``silu``, ``gelu_tanh``, or ``oai`` with a limit."""

    kind: str
    limit: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind}{self.limit:g}".replace(".", "p") if self.kind == "oai" else self.kind

    @property
    def bits(self) -> dict[str, int]:
        """The float32 constants of ``glu.mlir.j2``."""
        values = {
            "one": 1.0,
            "magic": 12582912.0,
            "least": swiglu.LEAST,
            "most": swiglu.MOST,
            "log2e": swiglu.LOG2E,
            "less_high": -swiglu.LN2_HIGH,
            "less_low": -swiglu.LN2_LOW,
            "slope": swiglu.OAI_SLOPE,
            "gelu_slope": swiglu.GELU_SLOPE,
            "gelu_cube": swiglu.GELU_CUBE,
            "limit": self.limit,
            "less_limit": -self.limit,
            **{f"p{index}": value for index, value in enumerate(swiglu.POLYNOMIAL)},
        }
        return {name: _float_bits(value) for name, value in values.items()}


@dataclass(frozen=True)
class Gemm:
    """``gemm.mlir.j2``: integer weights times codes.

    Attributes:
        isa: the body.
        io: dtype of the result.
        codes: what the activations are.
        bits: of the weights, 4 or 8.
        scale: dtype of the weight scales.
        zero: how zero points are given.
        bias: whether a bias is added.
        platform: the kind of device.
        experts: None, or which linear of experts it is: ``up`` (gate and up) or ``down``.
        glu: of ``up``, or of a dense linear whose outputs are gate's and then up's.
        residual: whether the results are added to something.
        levels: what the weights' codes stand for.
    """

    isa: InstructionSet
    io: str
    codes: Codes
    bits: int
    scale: str
    zero: Zero
    bias: bool
    platform: Platform = CPU
    experts: Literal["up", "down"] | None = None
    glu: Glu | None = None
    residual: bool = False
    levels: Levels = Levels.INTEGERS

    @property
    def symbol(self) -> str:
        rest = "_bias" * self.bias + "_residual" * self.residual
        rest += self.platform.suffix(self.io, self.scale)
        mode = f"{weight_kind(self.bits, self.levels)}_{self.codes.multiplied}"
        mode = "_".join([str(part) for part in (self.experts, self.glu) if part] + [mode])
        return f"halfbyte_gemm_{mode}_{self.isa.name}_{self.io}_{self.scale}_{self.zero.value}{rest}"

    def text(self) -> str:
        return render(
            self.platform.template("gemm"),
            name=self.symbol,
            io=self.io,
            mode=self.codes.mode,
            digits=self.codes.digits,
            off_centre=self.codes.off_centre,
            **self._of_weights,
            scale=self.scale,
            zero=self.zero.value,
            bias=self.bias,
            **self.platform.values,
            experts=self.experts,
            glu=self.glu.kind if self.glu else None,
            glu_bits=self.glu.bits if self.glu else {},
            residual=self.residual,
            **(self._of_threads if self.platform.is_gpu else self._of_vectors),
        )

    @property
    def _of_weights(self) -> dict[str, object]:
        """Unsigned weights, from 0 to ``highest``, are integers plus ``middle``; a ``table`` has integers by code."""
        table = self.levels.table
        middle = 2 ** (self.bits - 1) if table is None else -min(table)
        highest = 2**self.bits - 1 if table is None else max(table) + middle
        return {"bits": self.bits, "table": table, "middle": middle, "highest": highest}

    @property
    def _of_vectors(self) -> dict[str, object]:
        panel = ROW_BLOCK if self.isa.tiles else _PANEL_ROWS[self.codes.digits]
        return {"isa": self.isa, "row_block": ROW_BLOCK, "panel": panel}

    @property
    def _of_threads(self) -> dict[str, object]:
        """256 threads: 4 rows of 64 columns, or as many columns of a single row as `few_columns`."""
        rows = self.isa.rows[self.codes.digits][0]
        few = {"few_rows": 4, "few_columns": 64 if self.experts else 16}
        tile_rows = rows * (4 if self.isa is THREADS else 64)
        stage8 = 4 if self.platform is VULKAN_MMA else 16  # Vulkan has less shared memory
        return {"lanes": 1, "rows_per_thread": rows, "tile_rows": tile_rows, "stage8": stage8, **few}


@dataclass(frozen=True)
class Route:
    """``route.mlir.j2``: slots sorted by expert.

    Attributes:
        platform: the kind of device.
    """

    platform: Platform = CPU

    @property
    def symbol(self) -> str:
        return f"halfbyte_route{self.platform.suffix()}"

    def text(self) -> str:
        template = self.platform.template("route")
        return render(
            template,
            name=self.symbol,
            row_block=ROW_BLOCK,
            most_experts=MOST_EXPERTS,
            **self.platform.values,
        )


@dataclass(frozen=True)
class Combine:
    """``combine.mlir.j2``: the results of a token's slots added up.

    Attributes:
        io: dtype of the result.
        platform: the kind of device.
    """

    io: str
    platform: Platform = CPU

    @property
    def symbol(self) -> str:
        return f"halfbyte_combine_{self.io}{self.platform.suffix(self.io)}"

    def text(self) -> str:
        return render(self.platform.template("combine"), name=self.symbol, io=self.io, **self.platform.values)


@dataclass(frozen=True)
class CacheAppend:
    """``cache_append.mlir.j2``: new rows into a cache, in place.

    Attributes:
        io: dtype.
        platform: the kind of device.
    """

    io: str
    platform: Platform = CPU

    @property
    def symbol(self) -> str:
        return f"halfbyte_cache_append_{self.io}{self.platform.suffix()}"

    def text(self) -> str:
        template = self.platform.template("cache_append")
        return render(template, name=self.symbol, io=self.io, tokens=16, **self.platform.values)


@dataclass(frozen=True)
class TopK:
    """``topk.mlir.j2``: the largest of every row.

    Attributes:
        values: of a row.
        taken: how many of them.
        in_order: whether they fall.
        io: dtype.
        platform: the kind of device.
    """

    values: int
    taken: int
    in_order: bool
    io: str
    platform: Platform = CPU

    @property
    def symbol(self) -> str:
        order = "sorted_" if self.in_order else ""
        return f"halfbyte_topk_{self.taken}_of_{self.values}_{order}{self.io}{self.platform.suffix()}"

    def text(self) -> str:
        return render(
            "topk.mlir.j2",
            name=self.symbol,
            io=self.io,
            E=self.values,
            k=self.taken,
            in_order=self.in_order,
            partial=64 * self.taken <= self.values,
            depth=2 * (self.values.bit_length() - 1),
            rows=1 if self.platform.is_gpu else 8,
            **self.platform.values,
        )


@dataclass(frozen=True)
class Sample:
    """``sample.mlir.j2``: the next token out of logits.

    Attributes:
        platform: the kind of device.
    """

    platform: Platform = CPU

    @property
    def symbol(self) -> str:
        return f"halfbyte_sample{self.platform.suffix()}"

    def text(self) -> str:
        lanes = 1 if self.platform.is_gpu else 16
        template, bits = self.platform.template("sample"), Glu("silu").bits
        return render(
            template, name=self.symbol, lanes=lanes, glu=None, glu_bits=bits, **self.platform.values
        )


def weight_kind(bits: int, levels: Levels) -> str:
    """As symbols have it: ``w4``, ``w8``, ``w4e2m1``."""
    return f"w{bits}" + (levels.value if levels.table else "")


def _float_bits(value: float) -> int:
    """Of the nearest float32."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        block_start_string="{!",
        block_end_string="!}",
        undefined=jinja2.StrictUndefined,
        trim_blocks=False,
        autoescape=False,
    )


def render(template: str, **values: object) -> str:
    """The text of a template in ``templates/``; an unknown name in it is an error."""
    return _environment().get_template(template).render(**values)
