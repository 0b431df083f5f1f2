"""Checks token numbers before a program sees them: it would read outside its table for a wrong one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from halfbyte.errors import UsageError
from halfbyte.runtime.device_array import DeviceArray
from halfbyte.runtime.manifest import EntryPoint, Model


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
    _check_range(array, vocabulary)
    return array.astype(np.int64)


def check_fed(model: Model, entry: EntryPoint, inputs: Sequence[DeviceArray | np.ndarray[Any, Any]]) -> None:
    """Refuses what a decoder would read outside its embedding, or drop behind the end of its caches, for.

    Arrays on the device are not looked at: a token that the program drew may go back as it is.

    Args:
        model: of a decoder, whose calls begin with tokens and, where there are caches, a position; or of a graph.
        entry: the function's signature.
        inputs: of its shapes and dtypes; no tokens are fine.

    Raises:
        UsageError: tokens outside the vocabulary, or more than the caches hold from the position on.
    """
    if model.vocabulary is None or not inputs:
        return
    tokens, position = inputs[0], inputs[1] if len(inputs) > 1 else None
    if isinstance(tokens, np.ndarray) and tokens.size:
        _check_range(tokens, model.vocabulary)
    named = position is not None and entry.inputs[1].name == "position"
    if named and isinstance(position, np.ndarray) and model.max_context is not None:
        first, count = int(position.item()), tokens.shape[0]
        if first < 0 or first + count > model.max_context:
            raise UsageError(
                "position outside the context",
                found=f"{count} token{'s' * (count != 1)} from position {first} on",
                accepted=f"positions 0 to {model.max_context - 1}",
                advice="start with new caches, or compile with a larger --max-context",
            )


def _check_range(tokens: np.ndarray[Any, Any], vocabulary: int | None) -> None:
    """Of at least one token."""
    last = np.iinfo(np.int64).max if vocabulary is None else vocabulary - 1
    if tokens.min() < 0 or tokens.max() > last:
        outside = tokens[(tokens < 0) | (tokens > last)]
        raise UsageError("token outside the vocabulary", found=str(outside[0]), accepted=f"0 to {last}")
