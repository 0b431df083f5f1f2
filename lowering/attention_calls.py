"""The attention operators of a program: the function that each becomes, and the kernels it dispatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from halfbyte.lowering.imported_values import Shaped, constant, is_none
from halfbyte.lowering.kernels.attention import AttentionShape
from halfbyte.lowering.kernels.generator import Kernel, render
from halfbyte.lowering.kernels.kv_append import KvAppend, Rotation
from halfbyte.lowering.targets.target import Target


@dataclass(frozen=True)
class Called:
    """A call in place of an operator.

    Attributes:
        symbol: the function's name.
        text: the function, a ``util.func``.
        operands: what it is given, values of the torch dialect.
        results: types of what it gives.
        kernels: what it dispatches.
    """

    symbol: str
    text: str
    operands: tuple[Any, ...]
    results: tuple[str, ...]
    kernels: tuple[Kernel, ...] = ()


def _attention(target: Target, op: Any) -> Called:
    q, keys, values, position, sinks, *settings = op.operands
    operands = (q, keys, values, position, *([] if is_none(sinks) else [sinks]))
    value_width, scale, window, softcap, chunk = map(constant, settings)
    queries, cache = Shaped.of(q), Shaped.of(keys)
    (tokens, heads, width), (key_heads, blocks) = queries.shape, cache.shape[:2]
    assert heads is not None and width is not None and key_heads is not None
    bounds = (window, softcap, not is_none(sinks), chunk)
    shape = AttentionShape(heads // key_heads, width, value_width, scale, *bounds)
    kernel = target.attention(shape, queries.dtype, cache.dtype, tokens == 1)
    out = Shaped((tokens, heads * value_width), queries.dtype).type
    symbol = f"{kernel.symbol}_h{heads}_{_count(tokens)}_{_count(blocks)}"
    text = render(
        "attention_tokens.mlir.j2",
        name=symbol,
        kernel=kernel.symbol,
        q=queries.type,
        keys=cache.type,
        values=Shaped.of(values).type,
        sinks="" if is_none(sinks) else Shaped.of(sinks).type,
        out=out,
        Hkv=key_heads,
        T=tokens,
        B=blocks,
    )
    return Called(symbol, text, operands, (out,), (kernel,))


def _kv_append(target: Target, op: Any) -> Called:
    k, v, keys, values, _ = op.operands
    width = Shaped.of(k).shape[1]
    return _append(target, k, v, keys, values, (width, None, {}), tuple(op.operands))


def _rotate_append(target: Target, op: Any) -> Called:
    q, k, v, cos, sin, interleaved, keys, values, position = op.operands
    queries, table = Shaped.of(q), Shaped.of(cos)
    pairs = table.shape[1]
    assert pairs is not None
    types = {"q": queries.type, "table": table.type, "q_out": Shaped(queries.shape, "f32").type}
    turned = (queries.shape[1], Rotation(pairs, bool(constant(interleaved))), types)
    return _append(target, k, v, keys, values, turned, (q, k, v, cos, sin, keys, values, position))


def _append(
    target: Target,
    k: Any,
    v: Any,
    keys: Any,
    values: Any,
    turned: tuple[int | None, Rotation | None, dict[str, str]],
    operands: tuple[Any, ...],
) -> Called:
    """``turned``: query heads, how they are turned, and the types that takes."""
    new, value, cache = Shaped.of(k), Shaped.of(v), Shaped.of(keys)
    heads, rotation, types = turned
    (tokens, key_heads, width), value_width, blocks = new.shape, value.shape[2], cache.shape[1]
    assert width is not None and value_width is not None
    kernel = KvAppend(width, value_width, new.dtype, cache.dtype, rotation, target.platform)
    symbol = f"{kernel.symbol}_h{heads}x{key_heads}_{_count(tokens)}_{_count(blocks)}"
    caches = (cache.type, Shaped.of(values).type)
    text = render(
        "kv_append_tokens.mlir.j2",
        name=symbol,
        kernel=kernel.symbol,
        rotated=rotation is not None,
        k=new.type,
        v=value.type,
        keys=caches[0],
        values=caches[1],
        Hq=heads,
        Hkv=key_heads,
        T=tokens,
        B=blocks,
        **types,
    )
    rotated = (types["q_out"],) if rotation else ()
    return Called(symbol, text, operands, (*rotated, *caches), (kernel,))


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


def _count(size: int | None) -> str:
    return "d" if size is None else str(size)


ATTENTION: Mapping[str, Callable[[Target, Any], Called]] = {
    "torch.halfbyte.attention": _attention,
    "torch.halfbyte.kv_append": _kv_append,
    "torch.halfbyte.rotate_append": _rotate_append,
    "torch.halfbyte.blank_caches": _blank_caches,
}
