"""The arithmetic of halfbyte's e4m3 linears in numpy, written from its description."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch
from numpy_twin import Array, e4m3_per_token, flushed, fma, widest_block
from torch_bridge import tensor


@dataclass(frozen=True)
class Fp8Weight:
    """An e4m3 linear: bits uint8 [N, K]; scale float32 [blocks of N, blocks of K]; bias [N] or None."""

    bits: Array
    scale: Array
    block: tuple[int, int]
    bias: Array | None = None

    @property
    def values(self) -> Array:
        """float64 [N, K], without the scales."""
        return self.bits.view(ml_dtypes.float8_e4m3fn).astype(np.float64)

    def arguments(self, activations: str) -> tuple[object, ...]:
        """Of torch.ops.halfbyte.fp8_block_linear, after x."""
        return (*map(tensor, (self.bits, self.scale, self.bias)), *self.block, activations)


def random_fp8_weight(seed: int, outputs: int, inputs: int, block: tuple[int, int], bias: bool) -> Fp8Weight:
    """Every finite bit pattern, scales of both signs. A block size of 0 is the whole side."""
    random = np.random.default_rng(seed)
    bits = random.integers(0, 256, (outputs, inputs)).astype(np.uint8)
    bits[(bits & 127) == 127] = 0x3C
    over = (block[0] or outputs, block[1] or inputs)
    shape = (-(-outputs // over[0]), -(-inputs // over[1]))
    sign = np.where(random.random(shape) < 0.3, -1, 1)
    scale = (sign * np.exp(random.uniform(-6, -3, shape))).astype(np.float32)
    return Fp8Weight(bits, scale, over, random.normal(size=outputs).astype(np.float32) if bias else None)


def fp8_block_linear(x: Array, weight: Fp8Weight, quantized: bool) -> Array:
    """[M, N] of the dtype of x [M, K]. Sums of a piece of a block are exact in float64 and rounded once."""
    outputs, inputs = weight.bits.shape
    per_block, total = weight.block[1], np.zeros((len(x), outputs), np.float32)
    piece, wide = widest_block(per_block, inputs), flushed(x.astype(np.float32))
    scales = np.repeat(weight.scale, weight.block[0], axis=0)[:outputs]
    for block, start in enumerate(range(0, inputs, per_block)):
        end = min(start + per_block, inputs)
        codes, unit = wide[:, start:end].astype(np.float64), np.ones(len(x), np.float32)
        if quantized:
            whole, unit = e4m3_per_token(wide[:, start:end])
            codes = whole / 512
        with np.errstate(all="ignore"):
            both = flushed(unit[:, None] * scales[:, block])
            for first in range(start, end, piece):
                part = slice(first, min(first + piece, end))
                exact = codes[:, part.start - start : part.stop - start] @ weight.values[:, part].T
                total = fma(flushed(exact.astype(np.float32)), both, total)
    if weight.bias is not None:
        total = flushed(total + weight.bias)
    return total.astype(x.dtype)


def operator(x: Array, weight: Fp8Weight, activations: str) -> torch.Tensor:
    return torch.ops.halfbyte.fp8_block_linear(tensor(x), *weight.arguments(activations))
