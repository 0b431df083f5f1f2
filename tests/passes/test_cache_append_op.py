"""torch.ops.halfbyte.cache_append: rows into a cache at a position."""

from __future__ import annotations

import numpy as np
import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("position", "count"), [(0, 1), (0, 6), (3, 2), (5, 1), (4, 2), (4, 3), (6, 1), (9, 4), (2, 0)]
)
def test_writes_what_fits_and_keeps_the_rest(dtype: torch.dtype, position: int, count: int) -> None:
    random = np.random.default_rng(position)
    cache = torch.from_numpy(random.normal(size=(2, 6, 5))).to(dtype)
    rows = torch.from_numpy(random.normal(size=(2, count, 5))).to(dtype)
    before = cache.clone()
    out = torch.ops.halfbyte.cache_append(cache, rows, torch.tensor([position]))
    assert torch.equal(cache, before)
    assert out.dtype is dtype
    for head in range(2):
        for place in range(6):
            new = position <= place < position + count
            want = rows[head, place - position] if new else before[head, place]
            assert torch.equal(out[head, place], want)
