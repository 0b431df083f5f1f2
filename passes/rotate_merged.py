"""Lets ``rotate_append`` read queries, keys and values where a merged linear left them: ``rotate_append_merged``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch.fx import Node

from halfbyte.passes.graph_patterns import calls, itself
from halfbyte.passes.ops.kv_append import MOST_NORMED_HEADS
from halfbyte.passes.program import Program, drop_dead_state, replace

_aten: Any = torch.ops.aten
_ops: Any = torch.ops.halfbyte
_VIEWS = (_aten.view.default, _aten.reshape.default, _aten.unflatten.int)


@dataclass(frozen=True)
class RotateMerged:
    """Instead of three copies of columns of the linear's rows, one kernel that reads the rows.

    Norms of queries and keys are computed with it, if both are alike but for the weights. Where something else stands
    between the linear and the rotation, nothing changes.
    """

    name: str = "rotate-merged"

    def run(self, program: Program) -> int:
        found = 0
        for entry in program.entries.values():
            for node in [node for node in entry.graph.nodes if node.target is _ops.rotate_append.default]:
                q, k, v, *others = node.args
                columns = [_columns(part) for part in (q, k, v)]
                if not _side_by_side(columns) or (norms := _norms(columns)) is None:
                    continue
                heads = q.meta["val"].shape[1]
                with entry.graph.inserting_before(node):
                    target = _ops.rotate_append_merged.default
                    merged = entry.graph.call_function(target, (columns[0].whole, heads, *others, *norms))
                merged.meta = dict(node.meta)
                replace(entry, node, merged)
                found += 1
            drop_dead_state(entry)
        return found


@dataclass(frozen=True)
class _Columns:
    """Columns ``start`` to ``end`` of a value [1, T, N], as heads of ``width``.

    Attributes:
        norm: weight, eps and so on of the norm of each head, as `rms_norm` takes them; empty for none.
    """

    whole: Node
    start: int
    end: int
    width: int
    norm: tuple[Any, ...] = ()


def _columns(rows: Any) -> _Columns | None:
    """What rows [T, heads, D] were cut from."""
    steps = ((_aten.transpose.int, (0, 1)), (_aten.select.int, (0, 0)), (_aten.transpose.int, (1, 2)))
    for target, settings in steps:
        if not calls(rows, target) or rows.args[1:] != settings:
            return None
        rows = itself(rows.args[0])
    if not calls(rows, *_VIEWS):
        return None
    piece, apart = itself(rows.args[0]), rows.meta["val"].shape
    if calls(piece, _ops.rms_norm_merged.default):
        whole, start, heads, width, *norm = piece.args
        same = len(apart) == 4 and tuple(apart[2:]) == (heads, width)
        return _Columns(whole, start, start + heads * width, width, tuple(norm)) if same else None
    if not calls(piece, _aten.slice.Tensor):
        return None
    whole, dimension, start, end = piece.args
    value = piece.meta["val"]
    same = value.dim() == 3 and dimension in (-1, 2) and apart[2] * apart[3] == value.shape[2]
    return _Columns(whole, start, min(end, whole.meta["val"].shape[2]), apart[3]) if same else None


def _side_by_side(columns: list[_Columns | None]) -> TypeGuard[list[_Columns]]:
    """Whether queries, keys and values are the columns of one value, in this order and without others."""
    found = [part for part in columns if part is not None]
    if len(found) < len(columns) or any(part.whole is not found[0].whole for part in found):
        return False
    edges = [0, *(part.end for part in found)]
    in_order = [part.start for part in found] == edges[:-1]
    widths = [part.end - part.start for part in found]
    whole = found[0].whole.meta["val"].shape
    return in_order and len(whole) == 3 and edges[-1] == whole[2] and widths[1] == widths[2]


def _norms(columns: list[_Columns]) -> tuple[Any, ...] | None:
    """The operator's arguments for the norms of queries and keys; None where it has none for them."""
    q, k, v = (part.norm for part in columns)
    if v or q[1:] != k[1:]:
        return None
    if not q:
        return ()
    weights, heads = (q[0], k[0]), (columns[1].end - columns[0].start) // columns[0].width
    known = (
        None not in weights
        and len({weight.meta["val"].dtype for weight in weights}) == 1
        and heads <= MOST_NORMED_HEADS
    )
    return (*weights, *q[1:]) if known else None
