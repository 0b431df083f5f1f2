"""Latent attention of transformers' models over latents, instead of the keys and values of every head."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from halfbyte.passes.latent_heads import LatentHeads


def latent_heads(attention: torch.nn.Module) -> LatentHeads | None:
    """What an attention layer turns queries and results by, if it is over latents."""
    found = getattr(attention, "kv_b_proj", None)
    return found if isinstance(found, LatentHeads) else None


@contextlib.contextmanager
def unexpanded(model: torch.nn.Module) -> Iterator[None]:
    """While a model is called: its layers over latents give their attention function latents, as one head's keys."""
    layers: list[Any] = [module for module in model.modules() if latent_heads(module) is not None]
    for layer in layers:
        layer.expand_kv = _together
    try:
        yield
    finally:
        for layer in layers:
            del layer.expand_kv


def _together(latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[1, 1, T, rank + R] of latents and of the keys that all heads share; and the values, which are within."""
    return torch.cat([latents, rotated], -1), latents
