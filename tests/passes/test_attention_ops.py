"""torch.ops.halfbyte.attention, kv_append and rotate_append against plain arrays and torch's own attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_twin import Rule, attention, rotated

from halfbyte.passes.ops.attention_caches import key_cache_shape, value_cache_shape

CHECKS = ("test_schema", "test_faketensor")


def caches(heads: int, positions: int, width: int, value_width: int) -> list[torch.Tensor]:
    shapes = key_cache_shape(heads, positions, width), value_cache_shape(heads, positions, value_width)
    return [torch.full(shape, float("nan")) for shape in shapes]


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def test_the_layout_of_the_caches() -> None:
    """By hand: position 67 of head 1 is place 3 of block 1; column 70 of a value is column 6 of the second plane."""
    ops, [keys, values] = torch.ops.halfbyte, caches(2, 130, 20, 80)
    k, v = normal(0, 1, 2, 20), normal(1, 1, 2, 80)
    keys, values = ops.kv_append(k, v, keys, values, torch.tensor([67]))
    assert keys.shape == (2, 3, 20, 64) and values.shape == (2, 3, 64 * 80)
    assert torch.equal(keys[1, 1, :, 3], k[0, 1])
    assert values[1, 1, 3 * 64 + 5] == v[0, 1, 5]
    assert values[1, 1, 64 * 64 + 3 * 16 + 6] == v[0, 1, 70]
    assert int(keys.isfinite().sum()) == 40 and int(values.isfinite().sum()) == 160


@pytest.mark.parametrize(
    ("heads", "key_heads", "width", "value_width", "window", "softcap", "sinks"),
    [(6, 2, 20, 12, 0, 0.0, False), (2, 2, 16, 80, 5, 0.0, True), (4, 1, 8, 8, 0, 2.0, False)],
)
def test_attention_in_chunks(
    heads: int, key_heads: int, width: int, value_width: int, window: int, softcap: float, sinks: bool
) -> None:
    ops, (keys, values) = torch.ops.halfbyte, caches(key_heads, 70, width, value_width)
    q, k, v = (
        normal(i, 69, h, w)
        for i, (h, w) in enumerate([(heads, width), (key_heads, width), (key_heads, value_width)])
    )
    extra = normal(9, heads) if sinks else None
    rule = Rule(0.3, window, softcap)
    want = attention(q.numpy(), k.numpy(), v.numpy(), 0, rule, None if extra is None else extra.numpy())
    position = 0
    for count in (1, 3, 0, 60, 5):
        part, at = slice(position, position + count), torch.tensor([position])
        keys, values = ops.kv_append(k[part], v[part], keys, values, at)
        got = ops.attention(q[part], keys, values, at, extra, value_width, 0.3, window, softcap)
        assert got.shape == (count, heads * value_width)
        np.testing.assert_allclose(got.reshape(count, heads, value_width), want[part], atol=1e-6)
        position += count


@pytest.mark.parametrize(("heads", "key_heads", "width", "value_width"), [(6, 1, 40, 24), (4, 2, 80, 64)])
def test_attention_over_latents(heads: int, key_heads: int, width: int, value_width: int) -> None:
    """Values are the first columns of the keys; position 67 of the cache lies in place 3 of block 1."""
    ops = torch.ops.halfbyte
    cache = torch.full(value_cache_shape(key_heads, 70, width), float("nan"))
    q, rows = normal(0, 69, heads, width), normal(1, 69, key_heads, width)
    want = attention(q.numpy(), rows.numpy(), rows[..., :value_width].numpy(), 0, Rule(0.3))
    position = 0
    for count in (1, 0, 60, 8):
        part, at = slice(position, position + count), torch.tensor([position])
        cache = ops.latent_append(rows[part], cache, at)
        got = ops.attention(q[part], cache, None, at, None, value_width, 0.3, 0, 0.0)
        np.testing.assert_allclose(got.reshape(count, heads, value_width), want[part], atol=1e-6)
        position += count
    last = min(64, -(-width // 16) * 16)
    assert torch.equal(cache[0, 1, 3 * last : 3 * last + min(width, 64)], rows[67, 0, :64])
    filled = key_heads * 69 * -(-width // 16) * 16
    assert int(cache.isfinite().sum()) == filled  # what fills up the columns is 0
    dropped = ops.latent_append(rows[:3], cache, torch.tensor([127]))
    assert torch.equal(dropped[:, 0], cache[:, 0]) and int(dropped.isfinite().sum()) == filled + filled // 69


def test_products_of_heads() -> None:
    ops = torch.ops.halfbyte
    x, weight = normal(0, 5, 3, 11), normal(1, 3, 8, 32)
    weight[..., 20:] = float("nan")
    got = ops.head_linear(x, weight, 20)
    for head in range(3):
        product = x[:, head, :8].numpy().astype(np.float64) @ weight[head, :, :20].numpy().astype(np.float64)
        np.testing.assert_allclose(got[:, head, :20], product, atol=1e-6)
    assert torch.equal(got[..., 20:], x[..., 8:])
    assert ops.head_linear(x[:0], weight, 20).shape == (0, 3, 23)


def test_equals_the_attention_of_torch() -> None:
    ops, (keys, values) = torch.ops.halfbyte, caches(2, 40, 16, 16)
    q, k, v = normal(0, 40, 6, 16), normal(1, 40, 2, 16), normal(2, 40, 2, 16)
    start = torch.tensor([0])
    keys, values = ops.kv_append(k, v, keys, values, start)
    got = ops.attention(q, keys, values, start, None, 16, 0.25, 0, 0.0)
    sides = [x.transpose(0, 1)[None] for x in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*sides, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(got, want[0].transpose(0, 1).flatten(1), atol=2e-6, rtol=0)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation(interleaved: bool) -> None:
    ops, (keys, values) = torch.ops.halfbyte, caches(1, 9, 12, 4)
    q, k, v, angles = normal(0, 5, 3, 12), normal(1, 5, 1, 12), normal(2, 5, 1, 4), normal(3, 5, 4)
    turned, keys, values = ops.rotate_append(
        q, k, v, angles.cos(), angles.sin(), interleaved, keys, values, torch.tensor([2])
    )
    np.testing.assert_allclose(turned, rotated(q.numpy(), angles.numpy(), interleaved), atol=1e-6)
    want = rotated(k.numpy(), angles.numpy(), interleaved)[:, 0]
    np.testing.assert_allclose(keys[0, 0, :, 2:7].T, want, atol=1e-6)
    assert not torch.equal(turned[..., :8], q[..., :8]) and torch.equal(turned[..., 8:], q[..., 8:])


def test_rows_that_a_merged_linear_gives_are_taken_apart() -> None:
    ops, cleared = torch.ops.halfbyte, [cache.nan_to_num() for cache in caches(2, 9, 12, 12)]
    q, k, v, angles = normal(0, 5, 4, 12), normal(1, 5, 2, 12), normal(2, 5, 2, 12), normal(3, 5, 4)
    rest = (angles.cos(), angles.sin(), True, *cleared, torch.tensor([2]))
    qkv = torch.cat([x.flatten(1) for x in (q, k, v)], 1)[None]
    for got, want in zip(
        ops.rotate_append_merged(qkv, 4, *rest), ops.rotate_append(q, k, v, *rest), strict=True
    ):
        assert torch.equal(got, want)


@pytest.mark.parametrize("io", [torch.float32, torch.bfloat16])
def test_queries_and_keys_are_normed_before_they_are_turned(io: torch.dtype) -> None:
    ops, cleared = torch.ops.halfbyte, [cache.nan_to_num() for cache in caches(2, 9, 12, 12)]
    q, k, v = (normal(i, 5, heads, 12).to(io) for i, heads in enumerate((4, 2, 2)))
    weights, angles = [normal(7 + i, 12).to(io) for i in range(2)], normal(3, 5, 4)
    rest = (angles.cos(), angles.sin(), True, *cleared, torch.tensor([2]))
    qkv = torch.cat([x.flatten(1) for x in (q, k, v)], 1)[None]
    for how in ((1e-5, False, True), (1e-6, True, False)):
        got = ops.rotate_append_merged(qkv, 4, *rest, *weights, *how)
        normed = [ops.rms_norm(x, weight, *how) for x, weight in zip((q, k), weights, strict=True)]
        for one, want in zip(got, ops.rotate_append(*normed, v, *rest), strict=True):
            assert torch.equal(one, want)
    fake = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    with fake, pytest.raises(RuntimeError, match="queries and keys are normed, or neither"):
        ops.rotate_append_merged(qkv, 4, *rest, weights[0], None, 1e-5, False, False)


def test_rows_behind_the_end_are_dropped() -> None:
    ops, (keys, values) = torch.ops.halfbyte, caches(1, 64, 4, 4)
    keys, values = ops.kv_append(normal(0, 3, 1, 4), normal(1, 3, 1, 4), keys, values, torch.tensor([62]))
    for rows in (keys[0, 0].T, values.reshape(64, 16)[:, :4]):
        assert rows.isfinite().all(1).tolist() == [False] * 62 + [True] * 2


def test_what_does_not_fit_is_refused() -> None:
    ops, (keys, values) = torch.ops.halfbyte, caches(2, 64, 4, 4)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        at = torch.tensor([0])
        with pytest.raises(RuntimeError, match="queries are 5 wide, the keys of the cache 4"):
            ops.attention(torch.empty(1, 2, 5), keys, values, at, None, 4, 1.0, 0, 0.0)
        with pytest.raises(RuntimeError, match="3 query heads over 2 key heads"):
            ops.attention(torch.empty(1, 3, 4), keys, values, at, None, 4, 1.0, 0, 0.0)
        with pytest.raises(RuntimeError, match="for values 20 wide"):
            ops.attention(torch.empty(1, 2, 4), keys, values, at, None, 20, 1.0, 0, 0.0)
        with pytest.raises(RuntimeError, match="queries are 20 wide, a block of the cache 1024"):
            ops.attention(torch.empty(1, 2, 20), values, None, at, None, 4, 1.0, 0, 0.0)
        with pytest.raises(RuntimeError, match="values are 5 wide, their keys 4"):
            ops.attention(torch.empty(1, 2, 4), values, None, at, None, 5, 1.0, 0, 0.0)
        with pytest.raises(RuntimeError, match=r"latents .* into a cache of"):
            ops.latent_append(torch.empty(1, 1, 4), values, at)
        with pytest.raises(RuntimeError, match="times weights"):
            ops.head_linear(torch.empty(1, 2, 4), torch.empty(2, 5, 16), 16)
        with pytest.raises(RuntimeError, match="weights of 16 columns for 17 outputs"):
            ops.head_linear(torch.empty(1, 2, 4), torch.empty(2, 4, 16), 17)
        with pytest.raises(RuntimeError, match="into a cache of"):
            ops.kv_append(torch.empty(1, 1, 4), torch.empty(1, 1, 4), keys, values, at)
        with pytest.raises(RuntimeError, match="for 3 and 2 heads of 4"):
            table = torch.empty(1, 2)
            ops.rotate_append_merged(torch.empty(1, 1, 32), 3, table, table, False, keys, values, at)


def test_the_operators_agree_with_their_shapes() -> None:
    keys, values = (cache.nan_to_num() for cache in caches(1, 64, 8, 8))
    at, rows = torch.tensor([3]), normal(0, 2, 1, 8)
    ops = torch.ops.halfbyte
    check = torch.library.opcheck
    check(ops.kv_append.default, (rows, rows, keys, values, at), test_utils=CHECKS)
    angles = (normal(1, 2, 4), normal(2, 2, 4))
    check(ops.rotate_append.default, (rows, rows, rows, *angles, False, keys, values, at), test_utils=CHECKS)
    merged = (normal(0, 1, 2, 24), 1, *angles, False, keys, values, at)
    check(ops.rotate_append_merged.default, merged, test_utils=CHECKS)
    normed = (*merged, normal(3, 8), normal(4, 8), 1e-5, False, False)
    check(ops.rotate_append_merged.default, normed, test_utils=CHECKS)
    check(ops.attention.default, (rows, keys, values, at, None, 8, 1.0, 0, 0.0), test_utils=CHECKS)
    check(ops.attention.default, (rows, values, None, at, None, 8, 1.0, 0, 0.0), test_utils=CHECKS)
    check(ops.latent_append.default, (rows, values, at), test_utils=CHECKS)
    check(ops.head_linear.default, (rows, normal(5, 1, 6, 16), 12), test_utils=CHECKS)
    latents = ops.blank_latents(rows, "f16")
    assert latents.shape == (1, 2, 1024) and latents.dtype is torch.float16 and latents.isnan().all()
    blank = ops.blank_caches(rows, rows, "bf16")
    assert [cache.shape[1] for cache in blank] == [2, 2] and blank[0].shape == (1, 2, 8, 64)
    assert all(cache.dtype is torch.bfloat16 and cache.isnan().all() for cache in blank)
