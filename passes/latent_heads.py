"""`LatentHeads`: the module that stands where latent attention made keys and values of every head."""

from __future__ import annotations

from typing import Any

import torch

import halfbyte.passes.ops  # noqa: F401  registers torch.ops.halfbyte
from halfbyte.passes.ops.attention_caches import padded_width

_ops: Any = torch.ops.halfbyte


class LatentHeads(torch.nn.Module):
    """``kv_b_proj`` taken apart by heads: W_UK, which queries are multiplied by, and W_UV, which results are.

    Then latents themselves are keys and values (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1.2).

    Args:
        heads: H.
        key_width: columns of a head's query that meet latents.
        value_width: of a head's value.
        rank: columns of a latent.
        dtype: of the weights.
    """

    def __init__(self, heads: int, key_width: int, value_width: int, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.key_width, self.value_width, self.rank = heads, key_width, value_width, rank
        shapes = (key_width, padded_width(rank)), (rank, padded_width(value_width))
        self.keys, self.values = (
            torch.nn.Parameter(torch.empty(heads, *shape, dtype=dtype, device="meta"), requires_grad=False)
            for shape in shapes
        )

    def part(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """The parameter of that name, ``keys`` or ``values``, of kv_b_proj's weight [H * (key + value width), rank]."""
        by_head = weight.unflatten(0, (self.heads, -1))
        keys, values = by_head.split([self.key_width, self.value_width], 1)
        part = keys if name == "keys" else values.transpose(1, 2)
        return torch.nn.functional.pad(part, (0, padded_width(part.shape[2]) - part.shape[2]))

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """[T, H, rank + R] of queries [T, H, key width + R], whose last R columns are rotated, and stay."""
        turned: torch.Tensor = _ops.head_linear(q, self.keys, self.rank)
        return turned

    def results(self, latents: torch.Tensor) -> torch.Tensor:
        """[T, H, value width] of weighted sums of latents [T, H, rank]."""
        values: torch.Tensor = _ops.head_linear(latents, self.values, self.value_width)
        return values

    def extra_repr(self) -> str:
        return f"{self.heads} heads, {self.key_width} and {self.value_width} of {self.rank}"


def has_latent_heads(model: torch.nn.Module) -> bool:
    """Whether a model's attention is over latents."""
    return any(isinstance(module, LatentHeads) for module in model.modules())
