"""``halfbyte::attention``: causal attention of new tokens over caches that hold them already."""

from __future__ import annotations

import torch

from halfbyte.passes.ops.attention_caches import BLOCK, keys_by_position, padded_width, values_by_position
from halfbyte.passes.ops.library import LIBRARY

LIBRARY.define(
    "attention(Tensor q, Tensor keys, Tensor? values, Tensor position, Tensor? sinks, int value_width, float scale, "
    "int window, float softcap, int chunk=0) -> Tensor"
)


def attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    position: torch.Tensor,
    sinks: torch.Tensor | None,
    value_width: int,
    scale: float,
    window: int,
    softcap: float,
    chunk: int = 0,
) -> torch.Tensor:
    """softmax(q k^T * scale) v of every token and head over the positions up to the token's own.

    The softmax is torch's `scaled_dot_product_attention` with a causal mask, in float32; query head h reads key head
    h // (Hq / Hkv). ``softcap`` bounds scores as Gemma 2 does: softcap * tanh(score / softcap). ``sinks`` are those of
    gpt-oss: a score per head that takes part in the softmax and has no value. Positions that a token does not see, and
    what lies behind the last, have no influence whatever they hold. A row equals the same token computed alone.

    This reference computes in float64 and rounds once; compiled programs are within 4e-6 of the largest value.

    Args:
        q: float32, float16 or bfloat16 [T, Hq, D]; no token and one token are fine.
        keys, values: caches (`attention_caches`) of Hkv heads; token t is at position ``position + t`` in them. Without
            values ``keys`` is a cache of latents (`latent_append`): a value is the first Dv columns of its key.
        position: int64 [1], of the first token.
        sinks: float32 [Hq] or None.
        value_width: Dv.
        scale: of the scores.
        window: positions a token sees, itself included; 0 for all.
        softcap: bound of the scores; 0 for none.
        chunk: a token sees the positions of its own chunk of so many (Llama 4); 0 for all. With it window must be 0.

    Returns:
        [T, Hq * Dv] of the dtype of q.
    """
    tokens, heads, _ = q.shape
    start, group = int(position.item()), heads // keys.shape[0]
    seen = min(start + tokens, keys.shape[1] * BLOCK)
    if values is None:
        rows = values_by_position(keys, q.shape[2])
        pair = rows, rows[..., :value_width]
    else:
        pair = keys_by_position(keys), values_by_position(values, value_width)
    k, v = (x[:, :seen].double().repeat_interleave(group, 0) for x in pair)
    scores = torch.einsum("thd,hsd->hts", q.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    places, limits = torch.arange(seen), start + torch.arange(tokens)[:, None]
    visible = places <= limits
    if window:
        visible = visible & (places > limits - window)
    if chunk:
        visible = visible & (places >= limits // chunk * chunk)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(heads, tokens, 1)], -1)
    weights = torch.softmax(scores, -1)[..., :seen]
    # Not a product: 0 times what is no number would be no number.
    out = (
        torch.stack([weights[:, t][:, visible[t]].unsqueeze(1) @ v[:, visible[t]] for t in range(tokens)], 1)
        if tokens
        else v.new_zeros(heads, 0, 1, value_width)
    )
    return out.squeeze(2).transpose(0, 1).reshape(tokens, heads * value_width).to(q.dtype)


def _fake(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    position: torch.Tensor,
    sinks: torch.Tensor | None,
    value_width: int,
    scale: float,
    window: int,
    softcap: float,
    chunk: int = 0,
) -> torch.Tensor:
    heads, width = keys.shape[0], keys.shape[2]
    torch._check(q.shape[1] % heads == 0, lambda: f"{q.shape[1]} query heads over {heads} key heads")
    torch._check(not (window and chunk), lambda: f"a window of {window} and chunks of {chunk}")
    if values is None:
        fits = width == BLOCK * padded_width(q.shape[2])
        torch._check(fits, lambda: f"queries are {q.shape[2]} wide, a block of the cache {width}")
        torch._check(
            value_width <= q.shape[2], lambda: f"values are {value_width} wide, their keys {q.shape[2]}"
        )
    else:
        torch._check(
            q.shape[2] == width, lambda: f"queries are {q.shape[2]} wide, the keys of the cache {width}"
        )
        per_block = values.shape[2]
        torch._check(
            per_block == BLOCK * padded_width(value_width),
            lambda: f"a value cache of {per_block} per block for values {value_width} wide",
        )
    return q.new_empty((q.shape[0], q.shape[1] * value_width))


LIBRARY.impl("attention", attention, "CompositeExplicitAutograd")
torch.library.register_fake("halfbyte::attention", _fake, lib=LIBRARY)
