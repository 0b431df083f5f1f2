"""One layer of packed words as its tensors have it, and what can be made of it."""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.checkpoints.packing import Packing
from halfbyte.passes.scheme import WeightScheme, Zero


@dataclass(frozen=True)
class PackedLayer:
    """A layer as its tensors have it.

    Attributes:
        name: module path.
        shape: logical (N, K).
        bits: a width that `packing` unpacks, or another that only the configuration tells (then nothing else
            is known).
        packing: the layout of its words.
        groups: G.
        group_size: inputs per group; K for one group; 0 when groups have unequal sizes.
        symmetric: every zero point is in the middle.
        act_order: inputs of a group are not neighbours.
        scale_dtype: ``f16``, ``bf16`` or ``f32``.
    """

    name: str
    shape: tuple[int, int]
    bits: int
    packing: Packing
    groups: int = 0
    group_size: int = 0
    symmetric: bool = False
    act_order: bool = False
    scale_dtype: str = ""

    @property
    def readable(self) -> bool:
        """Whether its weights can be dequantized."""
        return self.bits in self.packing.widths

    @property
    def storage(self) -> str:
        """The format in words."""
        return self.packing.storage + ("" if self.bits == 4 else f", {self.bits} bits")

    def scheme(self) -> WeightScheme | None:
        """How it is compiled, or None when `why_refused` tells why not."""
        if self.why_refused():
            return None
        zero = Zero.SYMMETRIC if self.symmetric else Zero.INTEGER
        return WeightScheme(
            self.group_size, self.groups == 1, zero, self.scale_dtype, self.act_order, self.bits
        )

    def why_refused(self) -> tuple[str, str] | None:
        """(found, accepted) of a layer that cannot be compiled as it is."""
        if not self.readable:
            return f"bits = {self.bits}", f"bits = {' or '.join(map(str, self.packing.widths))}"
        if self.group_size == 0:
            return "groups of unequal size (g_idx)", "groups of one size, only the last may be shorter"
        if self.groups > 1 and self.group_size % 8:
            return f"group_size = {self.group_size}", "a multiple of 8, or -1 (one group per row)"
        return None
