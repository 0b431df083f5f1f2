"""The attention operators of a program: the function that each becomes, and the kernels it dispatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from halfbyte.lowering.called import Called
from halfbyte.lowering.imported_values import Shaped, constant, is_none
from halfbyte.lowering.kernels.attention import SEGMENT_BLOCKS, AttentionOfThreads, AttentionShape
from halfbyte.lowering.kernels.generator import RmsNorm, render
from halfbyte.lowering.kernels.kv_append import KvAppend, Rotation
from halfbyte.lowering.targets.target import Target


def _attention(target: Target, op: Any) -> Called:
    q, keys, values, position, sinks, *settings = op.operands
    operands = tuple(value for value in (q, keys, values, position, sinks) if not is_none(value))
    value_width, scale, window, softcap, chunk = map(constant, settings)
    queries, cache = Shaped.of(q), Shaped.of(keys)
    (tokens, heads, width), (key_heads, blocks) = queries.shape, cache.shape[:2]
    latent = is_none(values)
    assert heads is not None and width is not None and key_heads is not None
    bounds = (window, softcap, not is_none(sinks), chunk, latent)
    shape = AttentionShape(heads // key_heads, width, value_width, scale, *bounds)
    kernel = target.attention(shape, queries.dtype, cache.dtype, tokens == 1)
    out = Shaped((tokens, heads * value_width), queries.dtype).type
    symbol = f"{kernel.symbol}_h{heads}_{_count(tokens)}_{_count(blocks)}"
    types = {
        "q": queries.type,
        "keys": cache.type,
        "values": "" if latent else Shaped.of(values).type,
        "sinks": "" if is_none(sinks) else Shaped.of(sinks).type,
        "out": out,
    }
    sizes = {"Hkv": key_heads, "T": tokens, "B": blocks}
    several = blocks is None or blocks > SEGMENT_BLOCKS
    if isinstance(kernel, AttentionOfThreads) and tokens == 1 and several:
        parts = (replace(kernel, part="segments"), replace(kernel, part="join"))
        symbol = f"{parts[0].symbol}_h{heads}_{_count(blocks)}"
        text = render(
            "attention_segments.mlir.j2",
            name=symbol,
            segments=parts[0].symbol,
            join=parts[1].symbol,
            Hq=heads,
            width=kernel.kept_width,
            segment_blocks=SEGMENT_BLOCKS,
            **types,
            **sizes,
        )
        return Called(symbol, text, operands, (out,), parts)
    text = render("attention_tokens.mlir.j2", name=symbol, kernel=kernel.symbol, **types, **sizes)
    return Called(symbol, text, operands, (out,), (kernel,))


def _kv_append(target: Target, op: Any) -> Called:
    k, v, keys, values, _ = op.operands
    new, value = Shaped.of(k), Shaped.of(v)
    kernel = KvAppend(*_widths(new, value), new.dtype, Shaped.of(keys).dtype, None, target.platform)
    types = {"k": new.type, "v": value.type}
    return _append(kernel, None, new.shape[0], (keys, values), types, tuple(op.operands))


def _rotate_append(target: Target, op: Any) -> Called:
    q, k, v, cos, sin, interleaved, keys, values, position = op.operands
    queries, new, value = (Shaped.of(given) for given in (q, k, v))
    turned = Rotation(_pairs(cos), bool(constant(interleaved)))
    kernel = KvAppend(*_widths(new, value), new.dtype, Shaped.of(keys).dtype, turned, target.platform)
    types = {"q": queries.type, "k": new.type, "v": value.type, "table": Shaped.of(cos).type}
    operands = (q, k, v, cos, sin, keys, values, position)
    return _append(kernel, queries.shape[1], new.shape[0], (keys, values), types, operands)


def _rotate_append_merged(target: Target, op: Any) -> Called:
    qkv, heads, cos, sin, interleaved, keys, values, position, q_norm, k_norm, *settings = op.operands
    rows, cache, normed = Shaped.of(qkv), Shaped.of(keys), not is_none(q_norm)
    width = cache.shape[2]
    assert width is not None
    turned = Rotation(_pairs(cos), bool(constant(interleaved)))
    eps, plus_one, rounds = map(constant, settings)
    norm = RmsNorm(eps, bool(plus_one)) if normed else None
    weights = (q_norm, k_norm) if normed else ()
    kernel = KvAppend(
        width,
        width,
        rows.dtype,
        cache.dtype,
        turned,
        target.platform,
        merged=True,
        norm=norm,
        norm_weight=Shaped.of(q_norm).dtype if normed else "",
        norm_rounds=normed and bool(rounds) and rows.dtype != "f32",
    )
    types = {"qkv": rows.type, "table": Shaped.of(cos).type, "norm": Shaped.of(q_norm).type if normed else ""}
    operands = (qkv, cos, sin, *weights, keys, values, position)
    return _append(kernel, constant(heads), rows.shape[1], (keys, values), types, operands)


def _append(
    kernel: KvAppend,
    heads: int | None,
    tokens: int | None,
    caches: tuple[Any, Any],
    types: dict[str, str],
    operands: tuple[Any, ...],
) -> Called:
    """``heads``: of the queries, where they are turned; ``types``: of what is given beside caches and position."""
    keys, values = (Shaped.of(cache) for cache in caches)
    key_heads, blocks = keys.shape[:2]
    symbol = f"{kernel.symbol}_h{heads or 0}x{key_heads}_{_count(tokens)}_{_count(blocks)}"
    turned = (Shaped((tokens, heads, kernel.key_width), "f32").type,) if heads else ()
    text = render(
        "kv_append_tokens.mlir.j2",
        name=symbol,
        kernel=kernel.symbol,
        rotated=kernel.rotation is not None,
        merged=kernel.merged,
        normed=kernel.norm is not None,
        keys=keys.type,
        values=values.type,
        q_out="".join(turned),
        Hq=heads or 0,
        Hkv=key_heads,
        T=tokens,
        B=blocks,
        **types,
    )
    return Called(symbol, text, operands, (*turned, keys.type, values.type), (kernel,))


def _widths(k: Shaped, v: Shaped) -> tuple[int, int]:
    assert k.shape[2] is not None and v.shape[2] is not None
    return k.shape[2], v.shape[2]


def _pairs(table: Any) -> int:
    pairs = Shaped.of(table).shape[1]
    assert pairs is not None
    return pairs


def _blank_caches(target: Target, op: Any) -> Called:
    k, v, keys, values = (Shaped.of(value) for value in (*list(op.operands)[:2], *op.results))
    tokens, heads, width = k.shape
    symbol = f"halfbyte_blank_caches_{heads}x{width}x{v.shape[2]}_{_count(tokens)}_{k.dtype}_{keys.dtype}"
    text = render(
        "blank_caches.mlir.j2",
        name=symbol,
        k=k.type,
        v=v.type,
        keys=keys.type,
        values=values.type,
        B=keys.shape[1],
    )
    return Called(symbol, text, tuple(op.operands)[:2], (keys.type, values.type))


def _latent_append(target: Target, op: Any) -> Called:
    given, latents, _ = op.operands
    rows, cache = Shaped.of(given), Shaped.of(latents)
    tokens, heads, width = rows.shape
    assert width is not None
    kernel = KvAppend(width, width, rows.dtype, cache.dtype, None, target.platform, latent=True)
    blocks = cache.shape[1]
    symbol = f"{kernel.symbol}_h{heads}_{_count(tokens)}_{_count(blocks)}"
    text = render(
        "latent_append_tokens.mlir.j2",
        name=symbol,
        kernel=kernel.symbol,
        rows=rows.type,
        latents=cache.type,
        Hkv=heads,
        T=tokens,
        B=blocks,
    )
    return Called(symbol, text, tuple(op.operands), (cache.type,), (kernel,))


def _blank_latents(target: Target, op: Any) -> Called:
    rows, latents = Shaped.of(op.operands[0]), Shaped.of(op.results[0])
    tokens, heads, width = rows.shape
    symbol = f"halfbyte_blank_latents_{heads}x{width}_{_count(tokens)}_{rows.dtype}_{latents.dtype}"
    text = render(
        "blank_latents.mlir.j2", name=symbol, rows=rows.type, latents=latents.type, B=latents.shape[1]
    )
    return Called(symbol, text, (op.operands[0],), (latents.type,))


def _head_linear(target: Target, op: Any) -> Called:
    x, weight, outputs = op.operands
    given, weights, width = Shaped.of(x), Shaped.of(weight), constant(outputs)
    (tokens, heads, columns), inputs = given.shape, weights.shape[1]
    assert columns is not None and inputs is not None
    kept = columns - inputs
    kernel = target.head_linear(inputs, width, kept, given.dtype, weights.dtype, tokens == 1)
    out = Shaped((tokens, heads, width + kept), given.dtype).type
    symbol = f"{kernel.symbol}_h{heads}_{_count(tokens)}"
    text = render(
        "head_linear_tokens.mlir.j2",
        name=symbol,
        kernel=kernel.symbol,
        x=given.type,
        weight=weights.type,
        out=out,
        H=heads,
        T=tokens,
    )
    return Called(symbol, text, (x, weight), (out,), (kernel,), weight)


def _count(size: int | None) -> str:
    return "d" if size is None else str(size)


ATTENTION: Mapping[str, Callable[[Target, Any], Called]] = {
    "torch.halfbyte.attention": _attention,
    "torch.halfbyte.kv_append": _kv_append,
    "torch.halfbyte.rotate_append": _rotate_append,
    "torch.halfbyte.rotate_append_merged": _rotate_append_merged,
    "torch.halfbyte.blank_caches": _blank_caches,
    "torch.halfbyte.head_linear": _head_linear,
    "torch.halfbyte.latent_append": _latent_append,
    "torch.halfbyte.blank_latents": _blank_latents,
}
