"""What the codes of a weight stand for: integers as they are, or the entries of a table of 16 small ones."""

from __future__ import annotations

import enum

import torch

# 512 times the largest e4m3 value, and inputs that a block of such activations has at most.
_E4M3_MOST, _E4M3_BLOCK = 448 * 512, 128


class Levels(enum.Enum):
    """What a scale multiplies. Codes of 4 bits alone have tables, and such a weight is symmetric.

    ``INTEGERS``: the code, less the zero point. ``E2M1``: twice the value of the float of two bits of exponent and
    one of mantissa (OCP Microscaling's fp4), so that a scale is half of the format's. ``IQ4NL``: ggml's table of
    IQ4_NL and IQ4_XS.
    """

    INTEGERS = "integers"
    E2M1 = "e2m1"
    IQ4NL = "iq4nl"

    @property
    def table(self) -> tuple[int, ...] | None:
        """The 16 integers, by code; None where codes are integers."""
        return _TABLES.get(self)

    def kind(self, bits: int) -> str:
        """As schemes say it: ``int4``, ``int8``, or the table."""
        return f"int{bits}" if self is Levels.INTEGERS else self.value

    def exact_with_e4m3(self, bits: int) -> bool:
        """Whether sums with e4m3 activations, in their units of 2^-9, stay within 31 bits over a block of inputs."""
        reach = 2**bits - 1 if self.table is None else max(map(abs, self.table))
        return _E4M3_BLOCK * _E4M3_MOST * reach < 2**31

    def of(self, codes: torch.Tensor) -> torch.Tensor:
        """int8: the table's entries for uint8 codes of 0..15, of the same shape."""
        assert self.table is not None
        entries = torch.tensor(self.table, dtype=torch.int8)
        return entries.index_select(0, codes.reshape(-1).int()).reshape(codes.shape)


_TABLES = {
    Levels.E2M1: (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
    Levels.IQ4NL: (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
}
