"""``halfbyte::topk``: the largest values of every row, of equal ones those that torch takes."""

from __future__ import annotations

import torch

from halfbyte.passes.ops.library import LIBRARY

# What the kernel takes: more values per row would fill its stack, more of them torch sorts in another way.
MOST_VALUES, MOST_TAKEN = 1024, 17
TOPK_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

LIBRARY.define("topk(Tensor x, int k, bool in_order) -> (Tensor, Tensor)")


def topk(x: torch.Tensor, k: int, in_order: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """``torch.topk(x, k, sorted=in_order)`` on a CPU, its choice and order of equal values included.

    torch promises neither, but both follow from what it does (``ATen/native/TopKImpl.h``): std::partial_sort where
    ``64 * k <= E``, otherwise std::nth_element of the first k and, in order, std::sort of the first k - 1; as GCC's
    library has them, and with NaN as the largest value.

    Args:
        x: float32, float16 or bfloat16 [M, E], E at most 1024.
        k: at most E and 17.
        in_order: whether the values fall.

    Returns:
        values [M, k] and int64 places [M, k].
    """
    found = torch.topk(x, k, -1, True, in_order)
    return found.values, found.indices


def _fake(x: torch.Tensor, k: int, in_order: bool) -> tuple[torch.Tensor, torch.Tensor]:
    fits = x.dtype in TOPK_DTYPES and 1 <= k <= min(MOST_TAKEN, x.shape[1]) and x.shape[1] <= MOST_VALUES
    torch._check(
        fits,
        lambda: f"topk takes up to {MOST_TAKEN} of {MOST_VALUES} floats, not {k} of {x.shape[1]} {x.dtype}",
    )
    return x.new_empty((x.shape[0], k)), x.new_empty((x.shape[0], k), dtype=torch.int64)


LIBRARY.impl("topk", topk, "CompositeExplicitAutograd")
torch.library.register_fake("halfbyte::topk", _fake, lib=LIBRARY)
