"""The functions that stand for the attention operators of one shape in a program: kernels and how they are dispatched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from halfbyte.lowering.imported_values import Shaped
from halfbyte.lowering.kernels.attention import Attention, AttentionShape, best_unit
from halfbyte.lowering.kernels.generator import Kernel, render
from halfbyte.lowering.kernels.kv_append import KvAppend, Rotation
from halfbyte.lowering.targets.cpu import CpuTarget


@dataclass(frozen=True)
class Called:
    """A function to call.

    Attributes:
        symbol: its name.
        text: its ``util.func``.
        results: types of what it gives.
        kernels: what it dispatches.
    """

    symbol: str
    text: str
    results: tuple[str, ...]
    kernels: tuple[Kernel, ...] = ()


def attend(
    target: CpuTarget,
    q: Shaped,
    keys: Shaped,
    values: Shaped,
    sinks: Shaped | None,
    value_width: int,
    scale: float,
    window: int,
    softcap: float,
) -> Called:
    """``halfbyte::attention``; operands q, keys, values, position, and sinks if there are any."""
    (tokens, heads, width), (key_heads, blocks) = q.shape, keys.shape[:2]
    assert heads is not None and width is not None and key_heads is not None
    shape = AttentionShape(heads // key_heads, width, value_width, scale, window, softcap, sinks is not None)
    kernel = Attention(
        best_unit(target.features), shape, q.dtype, q.dtype, keys.dtype, tokens == 1, target.soft_f16
    )
    out = Shaped((tokens, heads * value_width), q.dtype).type
    symbol = f"{kernel.symbol}_h{heads}_{_count(tokens)}_{_count(blocks)}"
    text = render(
        "attention_tokens.mlir.j2",
        name=symbol,
        kernel=kernel.symbol,
        q=q.type,
        keys=keys.type,
        values=values.type,
        sinks=sinks.type if sinks is not None else "",
        out=out,
        Hkv=key_heads,
        T=tokens,
        B=blocks,
    )
    return Called(symbol, text, (out,), (kernel,))


def append(
    target: CpuTarget,
    new: Sequence[Shaped],
    tables: Sequence[Shaped],
    interleaved: bool,
    keys: Shaped,
    values: Shaped,
) -> Called:
    """``halfbyte::rotate_append`` of new = q, k, v and tables = cos, sin; without these ``halfbyte::kv_append`` of k, v."""
    *queries, k, v = new
    (tokens, key_heads, width), value_width, blocks = k.shape, v.shape[2], keys.shape[1]
    assert key_heads is not None and width is not None and value_width is not None
    rotation, heads, given = None, key_heads, {}
    if queries:
        [q], pairs = queries, tables[0].shape[1]
        assert pairs is not None and q.shape[1] is not None
        rotation, heads = Rotation(pairs, interleaved), q.shape[1]
        given = {"q": q.type, "table": tables[0].type, "q_out": Shaped(q.shape, "f32").type}
    kernel = KvAppend(width, value_width, k.dtype, keys.dtype, rotation, target.soft_f16)
    symbol = f"{kernel.symbol}_h{heads}x{key_heads}_{_count(tokens)}_{_count(blocks)}"
    text = render(
        "kv_append_tokens.mlir.j2",
        name=symbol,
        kernel=kernel.symbol,
        rotated=rotation is not None,
        k=k.type,
        v=v.type,
        keys=keys.type,
        values=values.type,
        Hq=heads,
        Hkv=key_heads,
        T=tokens,
        B=blocks,
        **given,
    )
    rotated = (given["q_out"],) if queries else ()
    return Called(symbol, text, (*rotated, keys.type, values.type), (kernel,))


def blank(k: Shaped, v: Shaped, keys: Shaped, values: Shaped) -> Called:
    """``halfbyte::blank_caches``; operands k, v."""
    tokens, heads, width = k.shape
    symbol = f"halfbyte_blank_caches_{heads}x{width}x{v.shape[2]}_{_count(tokens)}_{k.dtype}"
    text = render(
        "blank_caches.mlir.j2",
        name=symbol,
        k=k.type,
        v=v.type,
        keys=keys.type,
        values=values.type,
        B=keys.shape[1],
    )
    return Called(symbol, text, (keys.type, values.type))


def _count(size: int | None) -> str:
    return "d" if size is None else str(size)
