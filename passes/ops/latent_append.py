"""``halfbyte::latent_append``: the latents of latent attention into a cache of keys and values at once."""

from __future__ import annotations

import torch

from halfbyte.passes.ops.attention_caches import (
    BLOCK,
    padded_width,
    value_cache,
    value_cache_shape,
    values_by_position,
)
from halfbyte.passes.ops.kv_append import KINDS
from halfbyte.passes.ops.library import LIBRARY

LIBRARY.define("latent_append(Tensor rows, Tensor latents, Tensor position) -> Tensor")
LIBRARY.define("blank_latents(Tensor rows, str kind) -> Tensor")


def latent_append(rows: torch.Tensor, latents: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """The cache with new rows at ``position``. Functional here; a compiled program writes the caller's buffer.

    A row is a key, and its first columns are the value (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1:
    the compressed key-value, and behind it the rotated key that all heads share). The cache lies as one of values does
    (`attention_caches`); the columns that fill up a new row become 0.

    Everything downstream must read the result and never the cache again: then nothing is copied. Rows that would fall
    behind the end are dropped.

    Args:
        rows: float32, float16 or bfloat16 [T, Hkv, D].
        latents: the cache [Hkv, blocks, 64 P], whose dtype the rows are rounded to.
        position: int64 [1], where the first row goes.

    Returns:
        The cache.
    """
    start, width = int(position.item()), padded_width(rows.shape[2])
    old = values_by_position(latents, width).clone()
    count = max(0, min(rows.shape[0], old.shape[1] - start))
    new = torch.nn.functional.pad(rows[:count], (0, width - rows.shape[2]))
    old[:, start : start + count] = new.transpose(0, 1).to(latents.dtype)
    return value_cache(old)


def blank_latents(rows: torch.Tensor, kind: str) -> torch.Tensor:
    """A cache of ``kind`` (f32, f16 or bf16) for the ``rows`` [T, Hkv, D], holding anything; see `blank_caches`."""
    return torch.full_like(_blank_latents_fake(rows, kind), float("nan"))


def _latent_append_fake(rows: torch.Tensor, latents: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    fits = (latents.shape[0], latents.shape[2]) == (rows.shape[1], BLOCK * padded_width(rows.shape[2]))
    torch._check(fits, lambda: f"latents {list(rows.shape)} into a cache of {list(latents.shape)}")
    return torch.empty_like(latents)


def _blank_latents_fake(rows: torch.Tensor, kind: str) -> torch.Tensor:
    torch._check(kind in KINDS, lambda: f"caches must be of {', '.join(KINDS)}, not {kind!r}")
    heads, _, per_block = value_cache_shape(rows.shape[1], BLOCK, rows.shape[2])
    return rows.new_empty((heads, rows.shape[0] // BLOCK + 2, per_block), dtype=KINDS[kind])


for _name, _op, _fake in (
    ("latent_append", latent_append, _latent_append_fake),
    ("blank_latents", blank_latents, _blank_latents_fake),
):
    LIBRARY.impl(_name, _op, "CompositeExplicitAutograd")
    torch.library.register_fake(f"halfbyte::{_name}", _fake, lib=LIBRARY)
