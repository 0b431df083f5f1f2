"""``halfbyte::head_linear``: each head's own product, which latent attention turns queries and results by."""

from __future__ import annotations

import torch

from halfbyte.passes.ops.attention_caches import padded_width
from halfbyte.passes.ops.library import LIBRARY

LIBRARY.define("head_linear(Tensor x, Tensor weight, int outputs) -> Tensor")


def head_linear(x: torch.Tensor, weight: torch.Tensor, outputs: int) -> torch.Tensor:
    """The first K columns of every head times the head's weight, and behind that its other columns as they are.

    In latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1.2) a query times W_UK meets latents
    instead of keys, with its rotated columns behind; and a weighted sum of latents times W_UV is that of values.

    This reference computes in float64 and rounds once; compiled programs add in float32, in ascending order, so a row
    has the same bits whatever comes with it.

    Args:
        x: float32, float16 or bfloat16 [T, H, X], X at least K; no token and one token are fine.
        weight: float32, float16 or bfloat16 [H, K, P], P = ``outputs`` rounded up to a multiple of 16.
        outputs: N.

    Returns:
        [T, H, N + X - K] of the dtype of x.
    """
    _check(x, weight, outputs)
    inputs = weight.shape[1]
    product = torch.einsum("thk,hkn->thn", x[..., :inputs].double(), weight[..., :outputs].double())
    return torch.cat([product.to(x.dtype), x[..., inputs:]], -1)


def _check(x: torch.Tensor, weight: torch.Tensor, outputs: int) -> None:
    torch._check(
        x.shape[1] == weight.shape[0] and x.shape[2] >= weight.shape[1],
        lambda: f"heads of {list(x.shape[1:])} times weights {list(weight.shape)}",
    )
    torch._check(
        weight.shape[2] == padded_width(outputs),
        lambda: f"weights of {weight.shape[2]} columns for {outputs} outputs",
    )


def _fake(x: torch.Tensor, weight: torch.Tensor, outputs: int) -> torch.Tensor:
    _check(x, weight, outputs)
    return x.new_empty((x.shape[0], x.shape[1], outputs + x.shape[2] - weight.shape[1]))


LIBRARY.impl("head_linear", head_linear, "CompositeExplicitAutograd")
torch.library.register_fake("halfbyte::head_linear", _fake, lib=LIBRARY)
