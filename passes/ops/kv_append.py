"""``halfbyte::kv_append``, ``rotate_append`` and ``rotate_append_merged``: keys and values into attention's caches."""

from __future__ import annotations

import torch

from halfbyte.passes.ops.attention_caches import (
    BLOCK,
    key_cache,
    keys_by_position,
    padded_width,
    value_cache,
    values_by_position,
)
from halfbyte.passes.ops.library import LIBRARY
from halfbyte.passes.ops.rms_norm import check_norm, rms_norm

LIBRARY.define(
    "kv_append(Tensor k, Tensor v, Tensor keys, Tensor values, Tensor position) -> (Tensor, Tensor)"
)
LIBRARY.define(
    "rotate_append(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, bool interleaved, Tensor keys, Tensor values, "
    "Tensor position) -> (Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "rotate_append_merged(Tensor qkv, int heads, Tensor cos, Tensor sin, bool interleaved, Tensor keys, Tensor values, "
    "Tensor position, Tensor? q_norm=None, Tensor? k_norm=None, float eps=0.0, bool plus_one=False, bool rounds=False) "
    "-> (Tensor, Tensor, Tensor)"
)
LIBRARY.define("blank_caches(Tensor k, Tensor v, str kind) -> (Tensor, Tensor)")

# What a cache may be of.
KINDS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
# Of queries and keys together, as many as wait in the shared memory of a GPU.
MOST_NORMED_HEADS = 512
_Pair = tuple[torch.Tensor, torch.Tensor]


def kv_append(
    k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: torch.Tensor
) -> _Pair:
    """The caches with new rows at ``position``. Functional here; a compiled program writes the caller's buffers.

    Everything downstream must read the results and never the caches again: then nothing is copied. Rows that would
    fall behind the end are dropped.

    Args:
        k: float32, float16 or bfloat16 [T, Hkv, D].
        v: of the same dtype [T, Hkv, Dv].
        keys, values: caches (`attention_caches`), whose dtype the rows are rounded to.
        position: int64 [1], where the first row goes.

    Returns:
        The key and the value cache.
    """
    start, width = int(position.item()), v.shape[2]
    old_keys, old_values = keys_by_position(keys).clone(), values_by_position(values, width).clone()
    count = max(0, min(k.shape[0], old_keys.shape[1] - start))
    old_keys[:, start : start + count] = k[:count].transpose(0, 1).to(keys.dtype)
    old_values[:, start : start + count] = v[:count].transpose(0, 1).to(values.dtype)
    return key_cache(old_keys), value_cache(old_values)


def rotate_append(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`kv_append` of rotated keys, and the rotated queries, in float32 (RoPE, https://arxiv.org/abs/2104.09864).

    The first 2 R columns of a head are rotated by pairs: (i, i + R), or (2 i, 2 i + 1) where ``interleaved``; a pair
    (a, b) becomes (a cos - b sin, b cos + a sin). The columns behind them stay.

    Args:
        q: float32, float16 or bfloat16 [T, Hq, D].
        k, v, keys, values, position: as for `kv_append`.
        cos, sin: float32 [T, R], of the angles of a token's pairs.
        interleaved: which columns are a pair.

    Returns:
        q rotated, float32; the key and the value cache.
    """
    return (
        rotate(q.float(), cos, sin, interleaved),
        *kv_append(rotate(k.float(), cos, sin, interleaved), v, keys, values, position),
    )


def rotate_append_merged(
    qkv: torch.Tensor,
    heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    plus_one: bool = False,
    rounds: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`rotate_append` of q, k and v that stand side by side in a row, as a merged linear gives them.

    Args:
        qkv: float32, float16 or bfloat16 [1, T, (Hq + 2 Hkv) D]; values are as wide as keys.
        heads: Hq.
        cos, sin, interleaved, keys, values, position: as for `rotate_append`.
        q_norm, k_norm: weights [D], of one dtype, of the norms of queries and keys before they are turned, or None;
            at most `MOST_NORMED_HEADS` heads then.
        eps, plus_one, rounds: of both, as for `rms_norm`.
    """
    q, k, v = _apart(qkv, heads, keys)
    if q_norm is not None:
        q, k = (rms_norm(x, weight, eps, plus_one, rounds) for x, weight in ((q, q_norm), (k, k_norm)))
    return rotate_append(q, k, v, cos, sin, interleaved, keys, values, position)


def _apart(
    qkv: torch.Tensor, heads: int, keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    key_heads, width = keys.shape[0], keys.shape[2]
    torch._check(
        qkv.dim() == 3 and qkv.shape[0] == 1 and qkv.shape[2] == (heads + 2 * key_heads) * width,
        lambda: f"rows of {list(qkv.shape)} for {heads} and {key_heads} heads of {width}",
    )
    q, k, v = qkv[0].unflatten(-1, (-1, width)).split([heads, key_heads, key_heads], 1)
    return q, k, v


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """float32 [T, heads, D], rotated as `rotate_append` says."""
    pairs = cos.shape[1]
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    a, b = turned.unflatten(-1, (pairs, 2)).unbind(-1) if interleaved else turned.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    both = (a * cos - b * sin, b * cos + a * sin)
    out = torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)
    return torch.cat([out, rest], -1)


def blank_caches(k: torch.Tensor, v: torch.Tensor, kind: str) -> _Pair:
    """Caches of ``kind`` (f32, f16 or bf16) for the rows of ``k`` [T, Hkv, D] and ``v`` [T, Hkv, Dv], holding anything.

    They have a block or two more than needed: a size that may be 1 would be fixed by torch.export.
    """
    keys, values = (torch.full_like(cache, float("nan")) for cache in _blank_caches_fake(k, v, kind))
    return keys, values


def _check(k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    torch._check(
        tuple(keys.shape[i] for i in (0, 2, 3)) == (*k.shape[1:], BLOCK),
        lambda: f"keys {list(k.shape)} into a cache of {list(keys.shape)}",
    )
    torch._check(
        values.shape[2] == BLOCK * padded_width(v.shape[2]) and values.shape[0] == v.shape[1],
        lambda: f"values {list(v.shape)} into a cache of {list(values.shape)}",
    )


def _kv_append_fake(
    k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: torch.Tensor
) -> _Pair:
    _check(k, v, keys, values)
    return torch.empty_like(keys), torch.empty_like(values)


def _rotate_append_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check(k, v, keys, values)
    return torch.empty_like(q, dtype=torch.float32), torch.empty_like(keys), torch.empty_like(values)


def _rotate_append_merged_fake(
    qkv: torch.Tensor,
    heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    plus_one: bool = False,
    rounds: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = _apart(qkv, heads, keys)
    _check(k, v, keys, values)
    torch._check((q_norm is None) == (k_norm is None), lambda: "queries and keys are normed, or neither")
    if q_norm is not None and k_norm is not None:
        count = q.shape[1] + k.shape[1]
        torch._check(
            count <= MOST_NORMED_HEADS,
            lambda: f"{count} heads of queries and keys; {MOST_NORMED_HEADS} can be normed",
        )
        check_norm(q, q.shape[-1], q_norm)
        check_norm(k, k.shape[-1], k_norm)
        torch._check(
            q_norm.dtype == k_norm.dtype,
            lambda: f"norms of queries and keys have weights of {q_norm.dtype} and {k_norm.dtype}",
        )
    return (
        q.new_empty(q.shape, dtype=torch.float32),
        torch.empty_like(keys),
        torch.empty_like(values),
    )


def _blank_caches_fake(k: torch.Tensor, v: torch.Tensor, kind: str) -> _Pair:
    torch._check(kind in KINDS, lambda: f"caches must be of {', '.join(KINDS)}, not {kind!r}")
    count = k.shape[0] // BLOCK + 2
    return (
        k.new_empty((k.shape[1], count, k.shape[2], BLOCK), dtype=KINDS[kind]),
        v.new_empty((v.shape[1], count, BLOCK * padded_width(v.shape[2])), dtype=KINDS[kind]),
    )


for _name, _op, _fake in (
    ("kv_append", kv_append, _kv_append_fake),
    ("rotate_append", rotate_append, _rotate_append_fake),
    ("rotate_append_merged", rotate_append_merged, _rotate_append_merged_fake),
    ("blank_caches", blank_caches, _blank_caches_fake),
):
    LIBRARY.impl(_name, _op, "CompositeExplicitAutograd")
    torch.library.register_fake(f"halfbyte::{_name}", _fake, lib=LIBRARY)
