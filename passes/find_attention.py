"""Finds causal attention in graphs and rewrites it as ``halfbyte::attention``."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import statically_known_true

from halfbyte.passes.attention_masks import CausalMask, causal_mask
from halfbyte.passes.graph_patterns import calls, module_path, new_call
from halfbyte.passes.program import Program, drop_dead_state, replace

_aten: Any = torch.ops.aten
_ops: Any = torch.ops.halfbyte
_SDPA = _aten.scaled_dot_product_attention.default
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SHAPED = (
    *(_aten.reshape.default, _aten.view.default, _aten._unsafe_view.default, _aten.flatten.using_ints),
    *(_aten.clone.default, _aten.contiguous.default),
)
DONE = "halfbyte::attention"


@dataclass(frozen=True)
class FindAttention:
    """torch's ``scaled_dot_product_attention`` of one sequence, grouped heads or not, causal or with a mask that is.

    What does not match stays as it is, and the report says why.
    """

    name: str = "find-attention"

    def run(self, program: Program) -> int:
        found = 0
        for entry in program.entries.values():
            masks: dict[Any, CausalMask | str] = {}  # layers share theirs
            for node in [node for node in entry.graph.nodes if node.target is _SDPA]:
                mask = _mask(entry, node, masks)
                reason = mask if isinstance(mask, str) else _obstacle(node)
                program.report.attention[_where(node)] = f"stays as it is: {reason}" if reason else DONE
                if isinstance(mask, CausalMask) and not reason:
                    _rewrite(entry, node, mask.window)
                    found += 1
            if found:
                drop_dead_state(entry)  # and masks
            entry.graph_module.recompile()
        return found


def _arguments(node: torch.fx.Node) -> dict[str, Any]:
    names = [argument.name for argument in _SDPA._schema.arguments]
    defaults = {argument.name: argument.default_value for argument in _SDPA._schema.arguments}
    return defaults | dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _mask(
    entry: ExportedProgram, node: torch.fx.Node, known: dict[Any, CausalMask | str]
) -> CausalMask | str:
    """What tokens see, or why that is nothing of ours."""
    given = _arguments(node)
    mask, tokens = given["attn_mask"], given["query"].meta["val"].shape[-2]
    if mask is not None:
        if (mask, str(tokens)) not in known:
            known[mask, str(tokens)] = causal_mask(entry, mask, tokens)
        return known[mask, str(tokens)]
    if not given["is_causal"]:
        return "tokens see what comes after them; causal attention is accepted"
    return CausalMask(0)


def _obstacle(node: torch.fx.Node) -> str:
    """Why an attention is none of ours, or nothing."""
    given = _arguments(node)
    q, k, v = (given[name].meta["val"] for name in ("query", "key", "value"))
    if given["dropout_p"]:
        return "it drops out at random"
    if q.dim() != 4 or not statically_known_true(q.shape[0] == 1):
        return f"queries are {list(q.shape)}; [1, heads, T, D] is accepted"
    if not statically_known_true(q.shape[2] == k.shape[2]):
        return f"{q.shape[2]} queries over {k.shape[2]} keys; as many keys as queries are accepted"
    if q.dtype not in _DTYPES:
        return f"it is of {q.dtype}"
    if not all(isinstance(size, int) for x in (q, k, v) for size in (x.shape[1], x.shape[3])):
        return "heads and their width vary"
    if q.shape[1] != k.shape[1] and not given["enable_gqa"]:
        return f"{q.shape[1]} query heads over {k.shape[1]} key heads"
    return ""


def _rewrite(entry: ExportedProgram, node: torch.fx.Node, window: int) -> None:
    given, graph = _arguments(node), entry.graph
    width = given["query"].meta["val"].shape[3]
    value_width, heads = given["value"].meta["val"].shape[3], given["query"].meta["val"].shape[1]

    call = functools.partial(new_call, graph)

    def by_token(x: torch.fx.Node) -> torch.fx.Node:
        return call(_aten.transpose.int, call(_aten.select.int, x, 0, 0), 0, 1)

    def pair(made: torch.fx.Node) -> tuple[torch.fx.Node, torch.fx.Node]:
        return call(operator.getitem, made, 0), call(operator.getitem, made, 1)

    with graph.inserting_before(node):
        sides = (given["query"], *_once(given["key"], given["value"]))
        q, k, v = map(by_token, sides)
        position = call(_aten.full.default, [1], 0, dtype=torch.int64)
        blank = pair(call(_ops.blank_caches.default, k, v, "f32"))
        keys, values = pair(call(_ops.kv_append.default, k, v, *blank, position))
        scale = width**-0.5 if given["scale"] is None else float(given["scale"])
        out = call(_ops.attention.default, q, keys, values, position, None, value_width, scale, window, 0.0)
        apart = call(_aten.unflatten.int, out, 1, [heads, value_width])
        result = call(_aten.unsqueeze.default, call(_aten.transpose.int, apart, 0, 1), 0)
    replace(entry, node, result)


def _once(key: torch.fx.Node, value: torch.fx.Node) -> tuple[torch.fx.Node, torch.fx.Node]:
    """Keys and values before a graph repeats their heads for those of the queries, if it repeats both alike."""
    found = [_repeated(key), _repeated(value)]
    heads = {node.meta["val"].shape[1] for node in found if node is not None}
    return (key, value) if None in found or len(heads) != 1 else (found[0], found[1])  # type: ignore[return-value]


def _repeated(node: torch.fx.Node) -> torch.fx.Node | None:
    """x [1, H, T, D] behind the operations that make [1, H * n, T, D] of it, each head n times in a row."""
    result, inner = node.meta["val"], node
    while calls(inner, *_SHAPED):  # they change no order
        inner = inner.args[0]  # type: ignore[assignment]
    source: Any = inner.args[0] if calls(inner, _aten.expand.default) else None
    if not calls(source, _aten.unsqueeze.default) or source.args[1] not in (2, -3):
        return None
    x: torch.fx.Node = source.args[0]
    before, spread, shape = x.meta["val"].shape, inner.meta["val"].shape, result.shape
    times, rest = divmod(shape[1], before[1])
    wanted = (*before[:2], times, *before[2:])
    alike = len(spread) == 5 and all(map(_equal, spread, wanted)) and rest == 0
    return x if alike and all(map(_equal, shape[2:], before[2:])) else None


def _equal(one: Any, other: Any) -> bool:
    return statically_known_true(one == other)


def _where(node: torch.fx.Node) -> str:
    """The module that an attention is in, and the node."""
    path = module_path(node)
    return f"{path}: {node.name}" if path else node.name
