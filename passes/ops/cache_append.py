"""``halfbyte::cache_append``: writes new rows into a key or value cache."""

from __future__ import annotations

import torch

from halfbyte.passes.ops.library import LIBRARY

LIBRARY.define("cache_append(Tensor cache, Tensor rows, Tensor position) -> Tensor")


def cache_append(cache: torch.Tensor, rows: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """The cache with ``rows`` at ``position``. Functional here; a compiled program writes the caller's buffer in place.

    Everything downstream must read the result and never ``cache`` again: then nothing is copied. Rows that would
    fall behind the end of the cache are dropped.

    Args:
        cache: [heads, positions, D].
        rows: [heads, T, D], same dtype.
        position: int64 [1], where the first row goes.

    Returns:
        [heads, positions, D].
    """
    start = int(position.item())
    count = max(0, min(rows.shape[1], cache.shape[1] - start))
    out = cache.clone()
    out[:, start : start + count] = rows[:, :count]
    return out


def _fake(cache: torch.Tensor, rows: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(cache)


LIBRARY.impl("cache_append", cache_append, "CompositeExplicitAutograd")
torch.library.register_fake("halfbyte::cache_append", _fake, lib=LIBRARY)
