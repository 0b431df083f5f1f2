"""What activations become on their way to the integer datapath."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from halfbyte.passes.scheme import Activations


@dataclass(frozen=True)
class Codes:
    """Integers, and what scales them.

    Attributes:
        mode: ``int8`` or ``e4m3``, one scale per token; ``planes``, one per token and block.
        digits: 1 for int8, 2 or 3 for planes, 3 for e4m3.
        rounding: which of int8's.
    """

    mode: Literal["int8", "planes", "e4m3"]
    digits: int
    rounding: Activations = Activations.INT8

    @classmethod
    def of(cls, activations: Activations, digits: int) -> Codes:
        """What a linear that does this to its input multiplies with; ``digits`` of the float path."""
        if activations is Activations.NONE:
            return cls("planes", digits)
        return cls("int8", 1, activations) if activations.is_int8 else E4M3

    def __str__(self) -> str:
        kind = self.rounding.value if self.mode == "int8" else self.mode
        return f"planes{self.digits}" if self.mode == "planes" else kind

    @property
    def off_centre(self) -> bool:
        """Whether a row has a zero point beside its scale."""
        return self.mode == "int8" and self.rounding.has_zeros

    @property
    def fixed(self) -> bool:
        """Whether all rows are rounded with what an operand of the kernel holds."""
        return self.mode == "int8" and self.rounding is Activations.INT8_FIXED

    @property
    def multiplied(self) -> str:
        """What products take: whatever the rounding, codes with or without zero points."""
        return "int8_zeros" if self.off_centre else str(Codes(self.mode, self.digits))


INT8, E4M3 = Codes("int8", 1), Codes("e4m3", 3)
