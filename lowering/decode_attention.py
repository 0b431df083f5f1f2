"""Attention of one token over caches whose heads serve several query heads each, without copying the caches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def grouped_queries() -> Iterator[None]:
    """While a model is exported: the query heads of one key head become rows of one attention.

    transformers repeats keys and values for every query head instead, which a compiled program does by writing
    the whole caches out again for every token.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    usual = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        batch, heads, tokens, width = query.shape
        groups = key.shape[1]
        if tokens != 1 or heads == groups or attention_mask is None:
            out: tuple[torch.Tensor, None] = usual(
                module, query, key, value, attention_mask, scaling=scaling, **options
            )
            return out
        rows = query.reshape(batch, groups, heads // groups, width)
        mask = attention_mask.expand(batch, 1, heads // groups, key.shape[2])
        result = torch.nn.functional.scaled_dot_product_attention(
            rows, key, value, attn_mask=mask, scale=scaling
        )
        return result.reshape(batch, 1, heads, width), None

    ALL_ATTENTION_FUNCTIONS["sdpa"] = attention
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = usual
