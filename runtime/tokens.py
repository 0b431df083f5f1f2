"""Checks token numbers before a program sees them: it would read outside its table for a wrong one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from halfbyte.errors import UsageError


def check_tokens(
    tokens: Sequence[int] | np.ndarray[Any, Any], vocabulary: int | None
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns tokens as i64 [T].

    Args:
        tokens: at least one integer.
        vocabulary: number of tokens there are; None if unknown.

    Raises:
        UsageError: no tokens, or tokens outside the vocabulary.
    """
    array = np.asarray(tokens)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        raise UsageError(
            "no tokens", found=f"{array.dtype} {list(array.shape)}", accepted="a list of integers"
        )
    last = np.iinfo(np.int64).max if vocabulary is None else vocabulary - 1
    if array.min() < 0 or array.max() > last:
        outside = array[(array < 0) | (array > last)]
        raise UsageError("token outside the vocabulary", found=str(outside[0]), accepted=f"0 to {last}")
    return array.astype(np.int64)
