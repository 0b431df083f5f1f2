"""The element types a program's arguments can have, by the names MLIR and iree-run-module give them.

numpy has no bfloat16 and no 8-bit floats; arrays of those hold the raw bits in an unsigned integer of the
same width (``carrier``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class ElementType:
    """One element type.

    Attributes:
        name: as in MLIR, e.g. ``f32``, ``bf16``, ``f8E4M3FN``, ``i64``.
        carrier: the numpy dtype whose arrays hold its values, or its bits where ``bits_only``.
        hal_name: the member of ``iree.runtime.HalElementType``.
        bits_only: numpy cannot compute with it, the carrier holds raw bits.
    """

    name: str
    carrier: np.dtype[Any]
    hal_name: str
    bits_only: bool = False

    @property
    def bytes(self) -> int:
        """Bytes per element."""
        return self.carrier.itemsize

    @property
    def values(self) -> np.dtype[Any]:
        """The numpy dtype that computes with it: ml_dtypes' where numpy has none, else the carrier."""
        if not self.bits_only:
            return self.carrier
        import ml_dtypes  # comes with iree-base-runtime

        name = "bfloat16" if self.name == "bf16" else self.name.replace("f8", "float8_", 1).lower()
        return np.dtype(getattr(ml_dtypes, name))


def _table() -> dict[str, ElementType]:
    rows = [ElementType("i1", np.dtype(np.bool_), "BOOL_8")]
    for bits in (8, 16, 32, 64):
        signed, unsigned = np.dtype(f"int{bits}"), np.dtype(f"uint{bits}")
        # What PyTorch and torch-mlir call i64 is SINT_64 or INT_64 to IREE; programs accept both.
        rows.append(ElementType(f"i{bits}", signed, f"SINT_{bits}"))
        rows.append(ElementType(f"si{bits}", signed, f"SINT_{bits}"))
        rows.append(ElementType(f"ui{bits}", unsigned, f"UINT_{bits}"))
    for bits in (16, 32, 64):
        rows.append(ElementType(f"f{bits}", np.dtype(f"float{bits}"), f"FLOAT_{bits}"))
    rows.append(ElementType("bf16", np.dtype(np.uint16), "BFLOAT_16", bits_only=True))
    for name, hal_name in (
        ("f8E4M3FN", "FLOAT_8_E4M3_FN"),
        ("f8E4M3FNUZ", "FLOAT_8_E4M3_FNUZ"),
        ("f8E5M2", "FLOAT_8_E5M2"),
        ("f8E5M2FNUZ", "FLOAT_8_E5M2_FNUZ"),
        ("f8E8M0FNU", "FLOAT_8_E8M0_FNU"),
    ):
        rows.append(ElementType(name, np.dtype(np.uint8), hal_name, bits_only=True))
    return {row.name: row for row in rows}


ELEMENT_TYPES: dict[str, ElementType] = _table()
