"""What all operators of experts share: tokens go to their experts, and a token's results are added."""

from __future__ import annotations

from collections.abc import Callable

import torch

from halfbyte.passes.ops.float32 import flush


def routed(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: int,
    compute: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """y[t] = sum over slots s of weights[t, s] * compute(ids[t, s], x[t]).

    A slot's result is multiplied by its weight in float32, the slots of a token are added in their order, and the
    sum is cast to the dtype of x. A slot whose id is not an expert adds nothing.

    Args:
        x: float32, float16 or bfloat16 [T, H]; T may be 0.
        ids: int64 [T, k], the experts of each token.
        weights: float [T, k], read as float32.
        experts: their number.
        compute: an expert's float32 result [n, H] for float32 rows [n, H].
    """
    tokens, slots = ids.shape
    outputs = torch.zeros(tokens * slots, x.shape[-1], dtype=torch.float32)
    flat = ids.reshape(-1)
    for expert in range(experts):
        chosen = (flat == expert).nonzero().reshape(-1)
        if chosen.numel():
            made = compute(expert, x.float()[chosen // slots])
            outputs[chosen] = flush(made * weights.float().reshape(-1)[chosen, None])
    total = torch.zeros(tokens, x.shape[-1], dtype=torch.float32)
    for slot in range(slots):
        total = flush(total + outputs.reshape(tokens, slots, x.shape[-1])[:, slot])
    return total.to(x.dtype)


def of_expert(expert: int, tensor: torch.Tensor | None) -> torch.Tensor | None:
    """An expert's part of a stacked tensor."""
    return None if tensor is None else tensor[expert]
