"""``halfbyte::attention``: its kernels, by vector unit of a CPU, and of GPUs."""

from __future__ import annotations

import math
import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from halfbyte.lowering.kernels.generator import render
from halfbyte.lowering.kernels.platform import CPU, Platform
from halfbyte.passes.ops.attention_caches import padded_width

# 2^r for r in [-0.5, 0.5], from r^0 up.
_POWERS = (
    1.0,
    0.6931470036506653,
    0.24022242426872253,
    0.055507123470306396,
    0.009675541892647743,
    0.0013275800738483667,
)
# Of 64 positions, that GPUs compute by themselves: few enough to keep a GPU busy with a single token.
SEGMENT_BLOCKS = 4
# Queries, sums and statistics of a workgroup's rows; with the scores they fit a stack of 64 KiB.
_BLOCK_BYTES = 48 << 10
_STACK_BYTES = 62 << 10
# Of latents as many rows as can be: each workgroup reads all of the cache.
_LATENT_BLOCK_BYTES = 58 << 10
# Lines that one token fetches ahead of use: it waits for memory, where many tokens use each line often.
_AHEAD = 12
_LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class VectorUnit:
    """What a CPU multiplies float32 by, and the tiles it runs best with.

    Attributes:
        name: names the kernels.
        needs: CPU features in LLVM's spelling.
        lanes: float32 lanes of a vector.
        columns: vectors of a tile.
        columns_of_last: vectors of a tile in blocks that are not read to their end.
        rows: of a tile, at most.
        fused: multiplies and adds in one instruction.
        scalef: multiplies by a power of two in one instruction.
        tiles: has AMX-BF16 for blocks that all rows see, where the shape allows.
    """

    name: str
    needs: frozenset[str]
    lanes: int
    columns: int
    columns_of_last: int
    rows: int
    fused: bool = True
    scalef: bool = False
    tiles: bool = False


_AMX_BF16 = frozenset({"avx512f", "avx512bw", "avx512bf16", "amx-tile", "amx-bf16"})
AMX = VectorUnit("amx", _AMX_BF16, 16, 2, 2, 8, scalef=True, tiles=True)
AVX512 = VectorUnit("avx512", frozenset({"avx512f"}), 16, 4, 2, 6, scalef=True)
AVX2 = VectorUnit("avx2", frozenset({"avx2", "fma"}), 8, 2, 2, 6)
NEON = VectorUnit("neon", frozenset({"neon"}), 4, 4, 4, 4)
PLAIN = VectorUnit("plain", frozenset(), 4, 2, 2, 4, fused=False)
UNITS = (AMX, AVX512, AVX2, NEON, PLAIN)


@dataclass(frozen=True)
class AttentionShape:
    """What is fixed of an attention when it is compiled.

    Attributes:
        group: query heads of a key head.
        key_width, value_width: of a head.
        scale: of the scores.
        window: positions a token sees, itself included; 0 for all.
        softcap: bound of the scores; 0 for none.
        sinks: a score per query head takes part in the softmax and has no value.
        chunk: a token sees the positions of its own chunk of so many; 0 for all.
        latent: values are the first columns of the keys, and both lie as values do.
    """

    group: int
    key_width: int
    value_width: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    chunk: int = 0
    latent: bool = False

    @property
    def padded(self) -> int:
        """Columns of a value in its cache, or of a latent's value, filled up."""
        return padded_width(self.value_width)

    @property
    def query_columns(self) -> int:
        """Of a query, as many as a key has in its cache."""
        return padded_width(self.key_width) if self.latent else self.key_width

    @property
    def fits_tiles(self) -> bool:
        """Whether 16 rows of it fit tile registers and a stack of 64 KiB."""
        whole = (
            self.key_width % 32 == 0
            and self.value_width % 16 == 0
            and not (self.window or self.chunk or self.latent)
        )
        return whole and _tile_rows(self) > 0

    @property
    def label(self) -> str:
        parts = [f"g{self.group}", f"{self.key_width}x{self.value_width}", _spelled("scale", self.scale)]
        parts += [f"window{self.window}"] * bool(self.window) + [f"chunk{self.chunk}"] * bool(self.chunk)
        parts += [_spelled("cap", self.softcap)] * bool(self.softcap)
        return "_".join([*parts, *["sinks"] * self.sinks, *["latent"] * self.latent])


def best_unit(
    features: Collection[str], shape: AttentionShape, cache: str, one_token: bool = False
) -> VectorUnit:
    """The fastest unit of a CPU with these features (LLVM's names) for a shape, caches and one token or many."""
    tiles = cache == "bf16" and shape.fits_tiles and not one_token
    return vector_unit(features, tiles)


def vector_unit(features: Collection[str], tiles: bool = False) -> VectorUnit:
    """The fastest unit of a CPU with these features, among those with tile registers too if they have a use."""
    return next(unit for unit in UNITS if unit.needs <= set(features) and (tiles or not unit.tiles))


@dataclass(frozen=True)
class Attention:
    """``attention.mlir.j2``.

    Attributes:
        unit: what multiplies.
        shape: what is fixed.
        q_io: dtype of the queries.
        io: dtype of the result.
        cache: dtype of the caches.
        one_token: a kernel for calls of one token, whose rows are the heads of a group.
        platform: the kind of device.
    """

    unit: VectorUnit
    shape: AttentionShape
    q_io: str
    io: str
    cache: str = "f32"
    one_token: bool = False
    platform: Platform = CPU

    @property
    def rows(self) -> int:
        """Of a tile."""
        group = self.shape.group
        if not self.one_token or group % self.unit.rows == 0:
            return self.unit.rows
        return -(-group // -(-group // self.unit.rows))

    @property
    def symbol(self) -> str:
        kind = "_one" if self.one_token else ""
        rest = self.platform.suffix(self.q_io, self.io, self.cache)
        types = f"{self.q_io}_{self.io}_{self.cache}"
        return f"halfbyte_attention{kind}_{self.shape.label}_{self.unit.name}_{types}{rest}"

    def text(self) -> str:
        unit, shape = self.unit, self.shape
        planes = [
            {"start": start, "width": width, "used": used, "vectors": _vectors(unit, used)}
            for start in range(0, shape.padded, 64)
            for width in [min(64, (shape.query_columns if shape.latent else shape.padded) - start)]
            for used in [min(width, shape.padded - start)]
        ]
        row_bytes = 4 * (shape.query_columns + shape.padded + 3 * unit.lanes)
        most_bytes = _LATENT_BLOCK_BYTES if shape.latent else _BLOCK_BYTES
        row_block = max(1, most_bytes // row_bytes // self.rows) * self.rows
        if self.one_token:
            row_block = min(row_block, -(-shape.group // self.rows) * self.rows)
        elif unit.tiles:
            row_block = _tile_rows(shape)
        step = next(step for step in (4, 2, 1) if shape.key_width % step == 0)
        constants = {*range(5), *range(self.rows), *range(0, 65, unit.lanes)}
        return render(
            "attention.mlir.j2",
            name=self.symbol,
            unit=unit,
            planes=planes,
            **_numbers(shape),
            q_io=self.q_io,
            io=self.io,
            cache=self.cache,
            **self.platform.values,
            rows=self.rows,
            row_block=row_block,
            amx=unit.tiles,
            step=step,
            ahead=_AHEAD if self.one_token else 0,
            constants=sorted(constants),
        )


@dataclass(frozen=True)
class AttentionOfThreads:
    """``gpu/attention.mlir.j2``.

    Attributes:
        shape: what is fixed.
        q_io: dtype of the queries.
        io: dtype of the result.
        cache: dtype of the caches.
        platform: the kind of device.
        part: of two dispatches, the one that computes ``segments`` of positions, or the one that does ``join`` them.
    """

    shape: AttentionShape
    q_io: str
    io: str
    cache: str
    platform: Platform
    part: Literal["", "segments", "join"] = ""

    @property
    def symbol(self) -> str:
        kind, types = f"_{self.part}" if self.part else "", f"{self.q_io}_{self.io}_{self.cache}"
        return f"halfbyte_attention{kind}_{self.shape.label}_{types}{self.platform.suffix()}"

    @property
    def kept_width(self) -> int:
        """What is kept of a row and segment: 64 threads have the largest score, a sum of powers, and their columns."""
        return 64 * (2 + -(-self.shape.value_width // 64))

    def text(self) -> str:
        return render(
            self.platform.template("attention"),
            name=self.symbol,
            q_io=self.q_io,
            io=self.io,
            cache=self.cache,
            **_numbers(self.shape),
            **self.platform.values,
            part=self.part,
            segment_blocks=SEGMENT_BLOCKS,
            kept_width=self.kept_width,
        )


def _numbers(shape: AttentionShape) -> dict[str, object]:
    """What templates read of a shape."""
    base = 2 / shape.softcap if shape.softcap else 1.0
    return {
        "G": shape.group,
        "D": shape.key_width,
        "Dq": shape.query_columns,
        "latent": shape.latent,
        "Dv": shape.value_width,
        "Dv16": shape.padded,
        "window": shape.window,
        "chunk": shape.chunk,
        "softcap": shape.softcap,
        "cap_log2": _float32(shape.softcap * _LOG2E),
        "cap_log2_twice": _float32(2 * shape.softcap * _LOG2E),
        "sinks": shape.sinks,
        "q_scale": _float32(shape.scale * _LOG2E * base),
        "power_bits": [struct.unpack("<I", struct.pack("<f", value))[0] for value in _POWERS],
    }


def _tile_rows(shape: AttentionShape) -> int:
    """Rows of a workgroup with tile registers, a multiple of 16; 0 where not even 16 fit."""
    width, padded = shape.key_width, shape.padded
    row = 8 * width + 4 * padded + 3 * 64 + 256  # queries twice, sums, statistics, scores
    shared = 128 * max(width, padded) + 4096 + 8 * 256  # lines of pairs, powers, scores of the last block
    return (_STACK_BYTES - shared) // row // 16 * 16


def _vectors(unit: VectorUnit, width: int) -> int:
    """Vectors of a tile that divide a plane of values."""
    return next(n for n in range(unit.columns, 0, -1) if width % (n * unit.lanes) == 0)


def _float32(value: float) -> str:
    """A literal of the nearest float32."""
    return f"{struct.unpack('<f', struct.pack('<f', value))[0]:.9e}"


def _spelled(name: str, value: float) -> str:
    """A number as part of a symbol: its float32 bits."""
    return f"{name}{struct.unpack('<I', struct.pack('<f', value))[0]:08x}"
