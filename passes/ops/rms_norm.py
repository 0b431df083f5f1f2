"""``halfbyte::rms_norm`` and ``rms_norm_merged``: RMSNorm with a sum of stated order.

References and kernels give equal bits that way, and a norm by itself those of one that a linear is fused with.
"""

from __future__ import annotations

import torch

from halfbyte.passes.ops.float32 import flush, fma, root
from halfbyte.passes.ops.library import LIBRARY

LIBRARY.define("rms_norm(Tensor x, Tensor? weight, float eps, bool plus_one, bool rounds) -> Tensor")
LIBRARY.define(
    "rms_norm_merged(Tensor x, int first, int heads, int width, Tensor? weight, float eps, bool plus_one, bool rounds) "
    "-> Tensor"
)

# Partial sums of a row; they are then added to each other by halves.
SUMS = 64
NORM_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, plus_one: bool, rounds: bool = False
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, row by row (https://arxiv.org/abs/1910.07467), computed in float32.

    Partial sum j adds the squares of the inputs j, j + 64, ... by fused multiply-adds in ascending order; then 64
    sums become 32 by adding number i + 32 to number i, and so on to one. Every other operation is rounded on its
    own; x is multiplied by the reciprocal of the root first.

    Args:
        x: float32, float16 or bfloat16 [..., K].
        weight: [K] of one of these dtypes, or None for a factor of one.
        eps: taken as float32.
        plus_one: the factor is ``1 + weight``, in float32, as in Gemma.
        rounds: what is normed is rounded to the dtype of x before the weight multiplies it, as in Llama; without,
            it stays float32 until then, as in Gemma and OLMo 2.

    Returns:
        Of the shape and dtype of x.
    """
    inputs = x.shape[-1]
    check_norm(x, inputs, weight)
    wide = flush(x.float())
    parts = torch.nn.functional.pad(wide, (0, -inputs % SUMS)).unflatten(-1, (-1, SUMS))
    total = torch.zeros_like(parts[..., 0, :])
    for number in range(parts.shape[-2]):
        total = fma(parts[..., number, :], parts[..., number, :], total)
    while total.shape[-1] > 1:
        low, high = total.chunk(2, -1)
        total = flush(low + high)
    square = flush(total / inputs) + torch.tensor(eps, dtype=torch.float32)
    even = flush(wide * flush(1.0 / root(square)))
    if weight is None:
        return even.to(x.dtype)
    if rounds:
        even = even.to(x.dtype).float()
    factor = flush(weight.float())
    return flush(even * (flush(factor + 1.0) if plus_one else factor)).to(x.dtype)


def rms_norm_merged(
    x: torch.Tensor,
    first: int,
    heads: int,
    width: int,
    weight: torch.Tensor | None,
    eps: float,
    plus_one: bool,
    rounds: bool,
) -> torch.Tensor:
    """`rms_norm` of heads that stand side by side in a row, as a merged linear gives them.

    Args:
        x: float32, float16 or bfloat16 [..., N].
        first: the first head's first column.
        heads, width: the columns ``first`` to ``first + heads * width`` are normed, each ``width`` of them alone.
        weight: [width], or None.
        eps, plus_one, rounds: as for `rms_norm`.

    Returns:
        [..., heads * width].
    """
    _check_columns(x, first, heads, width)
    columns = x[..., first : first + heads * width].unflatten(-1, (heads, width))
    return rms_norm(columns, weight, eps, plus_one, rounds).flatten(-2)


def check_norm(x: torch.Tensor, width: int, weight: torch.Tensor | None) -> None:
    """Refuses rows and weights that no norm takes."""
    torch._check(x.dtype in NORM_DTYPES, lambda: f"rows must be float32, float16 or bfloat16, not {x.dtype}")
    torch._check(width > 0, lambda: "rows must hold at least one value, not none")
    torch._check(
        weight is None or (weight.dtype in NORM_DTYPES and list(weight.shape) == [width]),
        lambda: (
            f"the weight must be floats [{width}], not {weight if weight is None else list(weight.shape)}"
        ),
    )


def _check_columns(x: torch.Tensor, first: int, heads: int, width: int) -> None:
    torch._check(
        first >= 0 and first + heads * width <= x.shape[-1],
        lambda: f"{heads} heads of {width} from column {first} of {x.shape[-1]}",
    )


def _fake(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, plus_one: bool, rounds: bool
) -> torch.Tensor:
    check_norm(x, x.shape[-1], weight)
    return x.new_empty(x.shape)


def _merged_fake(
    x: torch.Tensor,
    first: int,
    heads: int,
    width: int,
    weight: torch.Tensor | None,
    eps: float,
    plus_one: bool,
    rounds: bool,
) -> torch.Tensor:
    check_norm(x, width, weight)
    _check_columns(x, first, heads, width)
    return x.new_empty((*x.shape[:-1], heads * width))


LIBRARY.impl("rms_norm", rms_norm, "CompositeExplicitAutograd")
torch.library.register_fake("halfbyte::rms_norm", _fake, lib=LIBRARY)
LIBRARY.impl("rms_norm_merged", rms_norm_merged, "CompositeExplicitAutograd")
torch.library.register_fake("halfbyte::rms_norm_merged", _merged_fake, lib=LIBRARY)
