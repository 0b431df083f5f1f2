"""One GPTQ layer as its tensors have it, and what can be made of it."""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.passes.scheme import WeightScheme, Zero

READABLE_BITS = (4, 8)


@dataclass(frozen=True)
class GptqLayer:
    """A layer as its tensors have it.

    Attributes:
        name: module path.
        shape: logical (N, K).
        bits: 4 or 8, or another width that only the configuration tells (then nothing else is known).
        version: of the zero points.
        groups: G.
        group_size: inputs per group; K for one group; 0 when groups have unequal sizes.
        symmetric: every zero point is in the middle.
        act_order: inputs of a group are not neighbours.
        scale_dtype: ``f16``, ``bf16`` or ``f32``.
    """

    name: str
    shape: tuple[int, int]
    bits: int
    version: int
    groups: int = 0
    group_size: int = 0
    symmetric: bool = False
    act_order: bool = False
    scale_dtype: str = ""

    @property
    def readable(self) -> bool:
        """Whether its weights can be dequantized."""
        return self.bits in READABLE_BITS

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
            return f"bits = {self.bits}", "bits = 4 or 8"
        if self.group_size == 0:
            return "groups of unequal size (g_idx)", "groups of one size, only the last may be shorter"
        if self.groups > 1 and self.group_size % 8:
            return f"group_size = {self.group_size}", "a multiple of 8, or -1 (one group per row)"
        return None
