"""The arithmetic of halfbyte's experts with e4m3 weights in numpy, and how far a kernel may be from it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import torch
from fp8_twin import Fp8Weight, fp8_block_linear, random_fp8_weight
from moe_twin import glu
from numpy_twin import Array, flushed
from torch_bridge import tensor

# Of a linear, of its largest output; see tests/lowering/test_operators_in_graphs.py.
_LINEAR = 2e-6


@dataclass(frozen=True)
class Fp8Experts:
    """gate, up [I, H] and down [H, I] of every expert."""

    gate: list[Fp8Weight]
    up: list[Fp8Weight]
    down: list[Fp8Weight]
    glu: str = "silu"
    limit: float = 0.0

    @property
    def hidden(self) -> int:
        return int(self.down[0].bits.shape[0])


def random_fp8_experts(
    seed: int,
    experts: int,
    hidden: int,
    middle: int,
    blocks: tuple[tuple[int, int], tuple[int, int]],
    bias: bool = False,
    glu: str = "silu",
) -> Fp8Experts:
    """Experts that all differ. A block size of 0 is the whole side."""

    def make(which: int, expert: int, outputs: int, inputs: int, block: tuple[int, int]) -> Fp8Weight:
        weight = random_fp8_weight(seed + 100 * expert + which, outputs, inputs, block, bias)
        return replace(weight, scale=weight.scale / np.float32(64))

    numbers = range(experts)
    return Fp8Experts(
        [make(1, e, middle, hidden, blocks[0]) for e in numbers],
        [make(2, e, middle, hidden, blocks[0]) for e in numbers],
        [make(3, e, hidden, middle, blocks[1]) for e in numbers],
        glu,
        7.0 if glu == "oai" else 0.0,
    )


def fp8_moe(
    x: Array, ids: Array, weights: Array, experts: Fp8Experts, quantized: bool
) -> tuple[Array, Array]:
    """[T, H] of the dtype of x; and how much a kernel may differ, float64 [T, H].

    That is the error of the linears' float32 sums, and what it can move a value of the product that lies between
    two codes.
    """
    wide, total = x.astype(np.float32), np.zeros(x.shape, np.float32)
    allowed = np.zeros(x.shape)
    with np.errstate(all="ignore"):
        for token in range(len(x)):
            for slot, expert in enumerate(ids[token]):
                if not 0 <= expert < len(experts.gate):
                    continue
                row, factor = wide[token : token + 1], np.float32(weights[token, slot])
                gate, up = (
                    fp8_block_linear(row, side[expert], quantized) for side in (experts.gate, experts.up)
                )
                middle = glu(gate, up, experts.glu, experts.limit)
                down = fp8_block_linear(middle, experts.down[expert], quantized)[0]
                moved = _moved(gate, up, middle, experts.down[expert], quantized)[0]
                moved = moved + 2 * _LINEAR * np.abs(down).max()
                allowed[token] += np.where(np.isfinite(moved), moved, 0) * abs(factor)
                total[token] = flushed(total[token] + flushed(down * factor))
        return total.astype(x.dtype), allowed


def _moved(gate: Array, up: Array, middle: Array, down: Fp8Weight, quantized: bool) -> Array:
    """What down makes of the error of the product [1, I]."""
    gate, up = gate.astype(np.float64), up.astype(np.float64)
    off = 1.2 * _LINEAR * np.abs(gate).max() * (np.abs(up) + 1)
    off = off + _LINEAR * np.abs(up).max() * np.abs(gate) + _LINEAR * np.abs(middle)
    scales = np.repeat(down.scale, down.block[0], axis=0)[: len(down.bits)].astype(np.float64)
    columns = np.arange(down.bits.shape[1]) // down.block[1]
    if quantized:
        starts = range(0, middle.shape[1], down.block[1])
        tops = np.array([np.abs(middle[:, start : start + down.block[1]]).max() for start in starts])
        unit = np.where(tops > 0, tops / 448, 1)[columns]
        low, high = (
            np.clip(side / unit, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
            for side in (middle - off, middle + off)
        )
        off = np.abs(high - low) * unit
    return off @ np.abs(down.values * scales[:, columns]).T


def fp8_moe_arguments(experts: Fp8Experts, activations: str) -> tuple[object, ...]:
    """Of torch.ops.halfbyte.fp8_block_moe, after x, ids and weights."""

    def stacked(*sides: list[Fp8Weight]) -> list[torch.Tensor | None]:
        def part(name: str) -> Array | None:
            rows = [[getattr(side[e], name) for side in sides] for e in range(len(sides[0]))]
            return None if rows[0][0] is None else np.stack([np.concatenate(row) for row in rows])

        return [tensor(part(name)) for name in ("bits", "scale", "bias")]

    blocks = (*experts.gate[0].block, *experts.down[0].block)
    rest = (*blocks, activations, experts.glu, experts.limit)
    return (*stacked(experts.gate, experts.up), *stacked(experts.down), *rest)
