"""How the key and value caches of an attention lie in memory, so that a kernel reads whole lines and nothing is moved.

Positions come in blocks of 64. Keys lie ``[heads, blocks, D, 64]``: a line holds one input of 64 positions. Values lie
``[heads, blocks, 64 * P]``, P = Dv rounded up to a multiple of 16: within a block one plane of up to 64 columns after
the other, ``[64, columns]`` each. What lies behind the last position, and the columns that fill up P, may be anything.
"""

from __future__ import annotations

import torch

BLOCK = 64


def blocks(positions: int) -> int:
    """Blocks that hold so many positions."""
    return -(-positions // BLOCK)


def padded_width(width: int) -> int:
    """Columns of a value in its cache."""
    return -(-width // 16) * 16


def key_cache_shape(heads: int, positions: int, width: int) -> tuple[int, int, int, int]:
    return heads, blocks(positions), width, BLOCK


def value_cache_shape(heads: int, positions: int, width: int) -> tuple[int, int, int]:
    return heads, blocks(positions), BLOCK * padded_width(width)


def keys_by_position(cache: torch.Tensor) -> torch.Tensor:
    """[heads, positions, D] of a key cache."""
    return cache.transpose(2, 3).flatten(1, 2)


def values_by_position(cache: torch.Tensor, width: int) -> torch.Tensor:
    """[heads, positions, width] of a value cache."""
    heads, count, _ = cache.shape
    planes = [
        cache[:, :, BLOCK * start : BLOCK * (start + columns)].reshape(heads, count * BLOCK, columns)
        for start, columns in _planes(width)
    ]
    return torch.cat(planes, -1)[..., :width]


def key_cache(keys: torch.Tensor) -> torch.Tensor:
    """The key cache of [heads, positions, D], positions a multiple of 64."""
    heads, positions, width = keys.shape
    return keys.reshape(heads, positions // BLOCK, BLOCK, width).transpose(2, 3).contiguous()


def value_cache(values: torch.Tensor) -> torch.Tensor:
    """The value cache of [heads, positions, Dv], positions a multiple of 64; columns that fill up are 0."""
    heads, positions, width = values.shape
    full = torch.nn.functional.pad(values, (0, padded_width(width) - width))
    planes = [
        full[:, :, start : start + columns].reshape(heads, positions // BLOCK, BLOCK * columns)
        for start, columns in _planes(width)
    ]
    return torch.cat(planes, -1)


def _planes(width: int) -> list[tuple[int, int]]:
    """First column and columns of every plane."""
    padded = padded_width(width)
    return [(start, min(BLOCK, padded - start)) for start in range(0, padded, BLOCK)]
