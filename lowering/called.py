"""A call in place of an operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from halfbyte.lowering.kernels.generator import Kernel


@dataclass(frozen=True)
class Called:
    """A call in place of an operator.

    Attributes:
        symbol: the function's name.
        text: the function, a ``util.func``.
        operands: what it is given, values of the torch dialect.
        results: types of what it gives.
        kernels: what it dispatches, and functions that it calls.
        weight: the operand that is a layer's weight, of a layer that the report has a row for.
    """

    symbol: str
    text: str
    operands: tuple[Any, ...]
    results: tuple[str, ...]
    kernels: tuple[Kernel, ...] = ()
    weight: Any = None
