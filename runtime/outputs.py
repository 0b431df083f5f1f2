"""Outputs of a call as iree-run-module prints and saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from halfbyte.errors import UsageError
from halfbyte.runtime.element_types import ELEMENT_TYPES


def write_output(text: str, array: np.ndarray[Any, Any], dtype: str) -> str | None:
    """Does with an output what an --output text says.

    Args:
        text: ``-`` for text; ``@file.npy`` or ``@file.bin`` to write, with ``+`` for ``@`` to append; empty
            for nothing.
        array: of the carrier dtype of ``dtype``.
        dtype: element type as in MLIR.

    Returns:
        The text to print for ``-``, else None.

    Raises:
        UsageError: the text is malformed or the file cannot be written.
    """
    if text in ("", "-"):
        return format_output(array, dtype) if text else None
    path = Path(text[1:])
    if text[0] not in "@+" or path.suffix not in (".npy", ".bin"):
        raise UsageError(
            "malformed output",
            found=repr(text),
            accepted="-, @file.npy or @file.bin; +file appends",
        )
    try:
        with path.open("ab" if text[0] == "+" else "wb") as file:
            if path.suffix == ".npy":
                np.save(file, array)
            else:
                file.write(np.ascontiguousarray(array).tobytes())
    except OSError as error:
        raise UsageError("cannot write", where=str(path), found=str(error)) from None
    return None


def format_output(array: np.ndarray[Any, Any], dtype: str, limit: int = 1024) -> str:
    """Returns shape, type and the first ``limit`` elements of an array: ``2x2xf32=[1 2][3 4]``.

    Args:
        array: of the carrier dtype of ``dtype``.
        dtype: element type as in MLIR.
        limit: elements to print.
    """
    values = np.asarray(array).view(ELEMENT_TYPES[dtype].values)
    return f"{'x'.join([*map(str, values.shape), dtype])}={_rows(values, limit)[0]}"


def _rows(part: np.ndarray[Any, Any], left: int) -> tuple[str, int]:
    """The text of an array of which ``left`` elements may be printed, and how many may be after it."""
    if part.ndim == 0:
        return _spell(part[()]), left - 1
    if part.ndim == 1:
        shown = part[:left]
        text = " ".join(_spell(value) for value in shown) + "..." * (len(shown) < len(part))
        return text, left - len(shown)
    pieces = []
    for row in part:
        text, left = _rows(row, left)
        pieces.append(f"[{text}]")
    return "".join(pieces), left


def _spell(value: Any) -> str:
    if isinstance(value, np.bool_):
        return f"{int(value):02x}"
    return str(int(value)) if isinstance(value, np.integer) else f"{float(value):G}"
