"""ggml's types of tensors: which of them are integer weights, and how rows of bytes become numbers.

A type whose values are codes times a scale, with at most a minimum, is read as such, exactly: as 4 bits when its
codes fit them, or name the entries of a table, else as 8. Every other type is dequantized to float32, by the gguf
package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from halfbyte.checkpoints import gguf_small_blocks as small
from halfbyte.checkpoints import gguf_super_blocks as large
from halfbyte.passes.levels import Levels
from halfbyte.passes.scheme import WeightScheme, Zero

_FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_ROWS = 2048


@dataclass(frozen=True)
class BlockType:
    """A type of codes times a scale.

    Attributes:
        bits: of the codes as read, 4 or 8.
        group: values that share a scale.
        zero: SYMMETRIC (codes around 8 or 128) or MINIMUM.
        scale_dtype: ``f16`` as stored, or ``f32`` where the scale is a product.
        size: bytes of a block.
        unpack: uint8 [N, B, size] -> codes uint8 [N, K], scale [N, G], minimum [N, G] or None.
        levels: what codes stand for.
    """

    bits: int
    group: int
    zero: Zero
    scale_dtype: str
    size: int
    unpack: Callable[[torch.Tensor], small.Parts]
    levels: Levels = Levels.INTEGERS

    def scheme(self, inputs: int) -> WeightScheme:
        """Of a weight with this many inputs."""
        groups = (self.group, inputs == self.group)
        return WeightScheme(*groups, self.zero, self.scale_dtype, bits=self.bits, levels=self.levels)


INTEGER = {
    "q4_0": BlockType(4, 32, Zero.SYMMETRIC, "f16", 18, small.q4_0),
    "q4_1": BlockType(4, 32, Zero.MINIMUM, "f16", 20, small.q4_1),
    "q5_0": BlockType(8, 32, Zero.SYMMETRIC, "f16", 22, small.q5_0),
    "q5_1": BlockType(8, 32, Zero.MINIMUM, "f16", 24, small.q5_1),
    "q8_0": BlockType(8, 32, Zero.SYMMETRIC, "f16", 34, small.q8_0),
    "iq4_nl": BlockType(4, 32, Zero.SYMMETRIC, "f16", 18, small.iq4_nl, Levels.IQ4NL),
    "q2_k": BlockType(4, 16, Zero.MINIMUM, "f32", 84, large.q2_k),
    "q3_k": BlockType(4, 16, Zero.SYMMETRIC, "f32", 110, large.q3_k),
    "q4_k": BlockType(4, 32, Zero.MINIMUM, "f32", 144, large.q4_k),
    "q5_k": BlockType(8, 32, Zero.MINIMUM, "f32", 176, large.q5_k),
    "q6_k": BlockType(8, 16, Zero.SYMMETRIC, "f32", 210, large.q6_k),
    "iq4_xs": BlockType(4, 32, Zero.SYMMETRIC, "f32", 136, large.iq4_xs, Levels.IQ4NL),
}


@dataclass(frozen=True)
class Blocks:
    """Codes uint8 [N, K], scale [N, G], minimum likewise or None (then zero is 8 or 128), and their type."""

    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor | None
    type: BlockType


def is_float(kind: str) -> bool:
    """Whether a type holds floats as they are."""
    return kind in _FLOATS


def float_dtype(kind: str) -> torch.dtype:
    """The dtype that `float_rows` gives for a type."""
    return _FLOATS.get(kind, torch.float32)


def can_dequantize(kind: str, number: int) -> bool:
    """Whether `float_rows` can read a type: floats, those of `INTEGER`, and what the gguf package can."""
    if kind in _FLOATS or kind in INTEGER:
        return True
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    quantization = GGMLQuantizationType(number)
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[quantization][1]), np.uint8), quantization)
    except NotImplementedError:
        return False
    return True


def integer_rows(raw: torch.Tensor, kind: str) -> Blocks:
    """uint8 [N, row bytes] of a type of `INTEGER` -> `Blocks`."""
    block = INTEGER[kind]
    return Blocks(*block.unpack(raw.reshape(raw.shape[0], -1, block.size)), block)


def float_rows(raw: torch.Tensor, kind: str, number: int) -> torch.Tensor:
    """uint8 [rows, row bytes] of any type `can_dequantize` names -> `float_dtype` [rows, K]."""
    if kind in _FLOATS:
        return raw.contiguous().view(_FLOATS[kind])
    # In parts, so that a large embedding needs little more memory than its result.
    first = _dequantized(raw[:_ROWS], kind, number)
    if len(raw) <= _ROWS:
        return first
    values = torch.empty(len(raw), first.shape[1])
    values[:_ROWS] = first
    for start in range(_ROWS, len(raw), _ROWS):
        values[start : start + _ROWS] = _dequantized(raw[start : start + _ROWS], kind, number)
    return values


def _dequantized(raw: torch.Tensor, kind: str, number: int) -> torch.Tensor:
    if kind in INTEGER:
        blocks = integer_rows(raw, kind)
        scale = blocks.scale.float().repeat_interleave(blocks.type.group, 1)
        if blocks.type.levels.table:
            return blocks.type.levels.of(blocks.codes).float() * scale
        if blocks.minimum is None:
            return (blocks.codes.float() - 2 ** (blocks.type.bits - 1)) * scale
        return blocks.codes.float() * scale + blocks.minimum.float().repeat_interleave(blocks.type.group, 1)
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):  # the caller looks for what is not finite
        values = dequantize(raw.numpy(), GGMLQuantizationType(number))
    return torch.from_numpy(np.ascontiguousarray(values, np.float32))
