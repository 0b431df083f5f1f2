"""A layer with integer codes, and what can be made of it."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from halfbyte.checkpoints.input_groups import read_g_idx, sequential
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.checkpoints.stored_layer import StoredLayer
from halfbyte.passes.scheme import WeightScheme, Zero
from halfbyte.passes.weight import QuantTensor
from halfbyte.passes.words import CodeWords, loose

READABLE_BITS = (4, 8)
_ROWS = 1024  # dequantized at a time, so that a large head needs little more memory than its result


class Codes(NamedTuple):
    """The numbers of a weight, inputs as stored: ``W[n, k] = (codes - zeros[n, g(k)]) * scales[n, g(k)]``.

    Attributes:
        codes: uint8 [N, K], or words of them.
        zeros: uint8 [N, G].
        scales: float [N, G].
    """

    codes: torch.Tensor | CodeWords
    zeros: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class IntegerLayer(StoredLayer):
    """A layer with integer codes as its tensors have it.

    Attributes:
        bits: 4 or 8, or another width that only the configuration tells (then nothing else is known).
        groups: G.
        group_size: inputs per group; K for one group; 0 when groups have unequal sizes.
        symmetric: every zero point is in the middle.
        act_order: inputs of a group are not neighbours.
        scale_dtype: ``f16``, ``bf16`` or ``f32``.
    """

    bits: int
    groups: int = 0
    group_size: int = 0
    symmetric: bool = False
    act_order: bool = False
    scale_dtype: str = ""
    g_idx: ClassVar[str] = "g_idx"  # what the format calls the tensor that gives the group of every input

    @abc.abstractmethod
    def read(self, tensors: SafetensorsFolder) -> Codes:
        """Reads and checks the tensors of a `readable` layer."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits that can be unpacked."""
        return READABLE_BITS

    @property
    def readable(self) -> bool:
        return self.bits in self.widths

    def scheme(self) -> WeightScheme | None:
        if self.why_refused():
            return None
        zero = Zero.SYMMETRIC if self.symmetric else Zero.INTEGER
        return WeightScheme(
            self.group_size, self.groups == 1, zero, self.scale_dtype, self.act_order, self.bits
        )

    def why_refused(self) -> tuple[str, str] | None:
        if not self.readable:
            return f"bits = {self.bits}", f"bits = {' or '.join(map(str, self.widths))}"
        if self.group_size == 0:
            return "groups of unequal size (g_idx)", "groups of one size, only the last may be shorter"
        if self.groups > 1 and self.group_size % 8:
            return f"group_size = {self.group_size}", "a multiple of 8, or -1 (one group per row)"
        return None

    def weight(self, tensors: SafetensorsFolder) -> QuantTensor:
        codes, zeros, scales = self.read(tensors)
        order = self.permutation(tensors)
        if order is not None:
            codes = loose(codes)[:, order]
        zero = None if self.symmetric else zeros
        return QuantTensor(self.name, codes, scales, self.group_size, zero, permutation=order, bits=self.bits)

    def dequantized(self, tensors: SafetensorsFolder) -> torch.Tensor:
        stored, zeros, scales = self.read(tensors)
        codes, group = loose(stored), self._input_groups(tensors)
        weight = torch.empty(codes.shape, dtype=torch.float32)
        for start in range(0, len(codes), _ROWS):
            rows = slice(start, start + _ROWS)
            difference = codes[rows].to(torch.int16) - zeros[rows].to(torch.int16)[:, group]
            torch.mul(difference, scales[rows].float()[:, group], out=weight[rows])
        return weight

    def permutation(self, tensors: SafetensorsFolder) -> torch.Tensor | None:
        return torch.argsort(self._input_groups(tensors), stable=True) if self.act_order else None

    def _input_groups(self, tensors: SafetensorsFolder) -> torch.Tensor:
        """int64 [K]: the group of every input."""
        inputs = self.shape[1]
        g_idx = read_g_idx(self.name, self.g_idx, inputs, self.groups, tensors)
        return sequential(self.group_size, inputs) if g_idx is None else g_idx
