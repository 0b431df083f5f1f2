"""Rotary embeddings in real numbers, for the models whose code computes them in complex ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def real_rotations() -> Iterator[None]:
    """While a model is exported: it rotates by sines and cosines, as complex numbers have no lowering.

    The products and sums are those of the complex multiplication.
    """
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek
    from transformers.models.llama4 import modeling_llama4 as llama

    # Heads come before positions in DeepSeek-V2, behind them in Llama 4.
    latent = _patched(deepseek, deepseek.DeepseekV2RotaryEmbedding, heads=2)
    with latent, _patched(llama, llama.Llama4TextRotaryEmbedding, heads=3):
        yield


@contextlib.contextmanager
def _patched(theirs: Any, kind: Any, heads: int) -> Iterator[None]:
    """``heads``: where cosines and sines [2, batch, T, width / 2] need an axis for them."""
    forward, apply = kind.forward, theirs.apply_rotary_emb

    def angles(self: Any, _: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        angle = position_ids[..., None].float() * self.inv_freq.float()
        return torch.stack([angle.cos(), angle.sin()]) * self.attention_scaling

    def rotate(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        cos, sin = turns.unsqueeze(heads)
        even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2).type_as(x)

    def both(q: torch.Tensor, k: torch.Tensor, turns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rotate(q, turns), rotate(k, turns)

    kind.forward, theirs.apply_rotary_emb = angles, both
    try:
        yield
    finally:
        kind.forward, theirs.apply_rotary_emb = forward, apply
