"""The packed weight layout of the CPU kernels, ``n64k8``: one sequential stream of bytes per 64 columns.

codes   4 bits: i8 [N/64][K/8][4][64]. In a 64-byte line l, byte 4n + i belongs to column 16l + n; its low nibble
        is input 8j + i, its high nibble input 8j + 4 + i. A line and two masks are two operands of vpdpbusd.
        8 bits: i8 [N/64][K/8][2][4][64]: the two operands as they are.
        e4m3: i8 [N/64][K/4][4][64], K padded to 8. In line l, byte 16L + 8h + 2c + i is input 4j + 2h + i of column
        16l + 4L + c: unpacking the low and the high bytes of the values into each other gives pairs of inputs.
scale, zero, minimum   [N/64][G][64]; of e4m3 weights f32 [N/64][blocks of inputs][64], times 256
bias    f32 [N/64 * 64], and so colsum, the sums of the weights of every output

N is padded to 64 and K to 8 with zeros: the padding of K meets activation codes that are 0, the padding of N
gives columns that no kernel stores. All modes read this one layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from halfbyte.passes.levels import Levels
from halfbyte.passes.ops import digit_block
from halfbyte.passes.ops.int8_roundings import column_sums
from halfbyte.passes.scheme import WeightScheme
from halfbyte.passes.weight import QuantTensor, scales_by_row
from halfbyte.passes.words import WORD_BITS, CodeWords

NAME = "n64k8"


def up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below value."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Packing:
    """The shapes of a packed (N, K) weight and the counts its kernels take as operands."""

    outputs: int
    inputs: int
    group_size: int
    bits: int = 4
    levels: Levels = Levels.INTEGERS  # they change no byte of the layout

    @property
    def column_blocks(self) -> int:
        return up(self.outputs, 64) // 64

    @property
    def input_blocks(self) -> int:
        return up(self.inputs, 8) // 8

    @property
    def row(self) -> int:
        """Bytes between the code rows of two activations: K padded, and off the multiples of 512.

        Rows a multiple of 4096 apart share the sets of an L1 cache, and a panel of them would not fit.
        """
        padded = 8 * self.input_blocks
        return padded + 64 if padded % 512 == 0 else padded

    @property
    def groups(self) -> int:
        return -(-self.inputs // self.group_size)

    def block(self, mode: str) -> int:
        """Inputs that share an activation sum (and, for planes, scale): a group for int8, else a `digit_block`."""
        if mode != "int8":
            return digit_block(self.group_size, self.inputs)
        return self.group_size if self.groups > 1 else 8 * self.input_blocks

    def blocks(self, block: int) -> int:
        return -(-self.inputs // block)

    def blocks_per_group(self, block: int) -> int:
        return self.blocks(block) if self.groups == 1 else self.group_size // block

    @property
    def codes_shape(self) -> tuple[int, ...]:
        lines = (4, 64) if self.bits == 4 else (2, 4, 64)
        return (self.column_blocks, self.input_blocks, *lines)

    @property
    def group_shape(self) -> tuple[int, int, int]:
        return (self.column_blocks, self.groups, 64)

    @property
    def bias_shape(self) -> tuple[int]:
        return (64 * self.column_blocks,)


def refusal(scheme: WeightScheme) -> str | None:
    """Why a weight of this scheme has no packed form, or None."""
    if scheme.bits not in (4, 8):
        return f"{scheme.bits} bits"
    if not scheme.channelwise and scheme.group_size % 8:
        return f"group size {scheme.group_size}"
    return None


def pack_codes(weight: QuantTensor) -> np.ndarray:
    """uint8 [N/64, K/8, 4, 64], or [N/64, K/8, 2, 4, 64] for 8 bits, from the codes of a weight."""
    outputs, inputs = weight.shape
    blocks, eights = up(outputs, 64) // 64, up(inputs, 8) // 8
    words = np.empty((blocks, eights * (1 if weight.bits == 4 else 2), 64), "<u4")
    if isinstance(weight.stored, CodeWords):
        _order_words(weight.stored, words)
    else:
        codes = weight.stored.numpy()
        for block in range(blocks):
            part = codes[64 * block : 64 * block + 64]
            if part.shape != (64, 8 * eights):
                part = np.pad(part, ((0, 64 - len(part)), (0, 8 * eights - inputs)))
            words[block] = (_four_bits if weight.bits == 4 else _eight_bits)(np.ascontiguousarray(part)).T
    lines = (4, 64) if weight.bits == 4 else (2, 4, 64)
    return words.view(np.uint8).reshape(blocks, eights, *lines)


def _order_words(stored: CodeWords, out: np.ndarray) -> None:
    """The words of all rows into uint32 [N/64, words, 64]."""
    rows = stored.words.numpy().view("<u4")
    count, partial = rows.shape[1], stored.inputs * stored.bits % WORD_BITS
    spare = np.empty(out.shape[1:], "<u4")
    for block, lines in enumerate(out):
        part = rows[64 * block : 64 * block + 64]
        lines[:count, : len(part)] = part.T
        lines[:count, len(part) :] = 0
        lines[count:] = 0
        if partial:
            lines[count - 1] &= np.uint32((1 << partial) - 1)
        if stored.bits == 4:
            # Codes 0 1 2 3 4 5 6 7 of a word to 0 4 1 5 2 6 3 7.
            _swap(lines, spare, 8, 0x0000FF00)
            _swap(lines, spare, 4, 0x00F000F0)


def _swap(words: np.ndarray, spare: np.ndarray, distance: int, low: int) -> None:
    """Exchanges the bits `low` of every word for those `distance` above them."""
    np.right_shift(words, distance, out=spare)
    np.bitwise_xor(words, spare, out=spare)
    np.bitwise_and(spare, low, out=spare)
    np.bitwise_xor(words, spare, out=words)
    np.left_shift(spare, distance, out=spare)
    np.bitwise_xor(words, spare, out=words)


def _four_bits(codes: np.ndarray) -> np.ndarray:
    """uint8 [N, K] -> [N, K/8] words: byte i of one holds code i of its 8 inputs, and code i + 4 above it."""
    eights = codes.view("<u8")
    return (eights | (eights >> np.uint64(28))).astype("<u4")


def _eight_bits(codes: np.ndarray) -> np.ndarray:
    """uint8 [N, K] -> [N, K/4] words."""
    return codes.view("<u4")


def pack_groups(values: torch.Tensor) -> np.ndarray:
    """[N, G] of any dtype -> [N/64, G, 64], padded with zeros; 16-bit floats come back as uint16 bits."""
    outputs, groups = values.shape
    bits = (
        values.contiguous().view(torch.uint16) if values.dtype in (torch.float16, torch.bfloat16) else values
    )
    padded = np.zeros((up(outputs, 64), groups), bits.numpy().dtype)
    padded[:outputs] = bits.numpy()
    return np.ascontiguousarray(padded.reshape(-1, 64, groups).transpose(0, 2, 1))


def pack_bias(bias: torch.Tensor) -> np.ndarray:
    """float [N] -> float32 [N padded to 64]."""
    padded = np.zeros(up(bias.shape[0], 64), np.float32)
    padded[: bias.shape[0]] = bias.float().numpy()
    return padded


def pack_column_sums(weight: QuantTensor) -> np.ndarray:
    """float32 [N padded to 64]: the sum of the weights of every output."""
    parts = (weight.codes, weight.scale, weight.zero, weight.minimum)
    return pack_bias(column_sums(*parts, weight.bits, weight.group_size, weight.levels))


def pack_fp8(weight: torch.Tensor) -> np.ndarray:
    """uint8 bits of e4m3 [N, K] -> [N/64, K/4, 4, 64], K padded to 8."""
    outputs, inputs = weight.shape
    padded = np.zeros((up(outputs, 64), up(inputs, 8)), np.uint8)
    padded[:outputs, :inputs] = weight.numpy()
    lines = padded.reshape(-1, 4, 4, 4, padded.shape[1] // 4, 2, 2).transpose(0, 4, 1, 2, 5, 3, 6)
    return np.ascontiguousarray(lines).reshape(-1, padded.shape[1] // 4, 4, 64)


def pack_block_scales(scale: torch.Tensor, outputs: int, block_outputs: int) -> np.ndarray:
    """[ceil(N / block_outputs), B] of any float dtype -> float32 [N/64, B, 64], one per column, times 256."""
    return pack_groups(scales_by_row(scale.float(), outputs, block_outputs) * 256.0)


def side_by_side(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Two packed linears of equal shape [N/64, ...] as one whose blocks of 64 columns take turns, [2 * N/64, ...]."""
    return np.stack([gate, up], 1).reshape(2 * len(gate), *gate.shape[1:])
