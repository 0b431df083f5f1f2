"""Lets ``rotate_append`` read queries, keys and values where a merged linear left them: ``rotate_append_merged``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from halfbyte.passes.program import Program, drop_dead_state, replace

_aten: Any = torch.ops.aten
_ops: Any = torch.ops.halfbyte
_VIEWS = (_aten.view.default, _aten.reshape.default)


@dataclass(frozen=True)
class RotateMerged:
    """Instead of three copies of columns of the linear's rows, one kernel that reads the rows.

    Where something else stands between the linear and the rotation (a norm of queries and keys), nothing changes.
    """

    name: str = "rotate-merged"

    def run(self, program: Program) -> int:
        found = 0
        for entry in program.entries.values():
            for node in [node for node in entry.graph.nodes if node.target is _ops.rotate_append.default]:
                q, k, v, *others = node.args
                columns = [_columns(part) for part in (q, k, v)]
                if not _side_by_side(columns):
                    continue
                heads = q.meta["val"].shape[1]
                with entry.graph.inserting_before(node):
                    target = _ops.rotate_append_merged.default
                    merged = entry.graph.call_function(target, (columns[0][0], heads, *others))
                merged.meta = dict(node.meta)
                replace(entry, node, merged)
                found += 1
            drop_dead_state(entry)
        return found


def _columns(rows: Any) -> tuple[Node | None, int, int]:
    """The value [1, T, N] that rows [T, heads, D] were cut from, and the first and the last column; None for none."""
    steps = ((_aten.transpose.int, (0, 1)), (_aten.select.int, (0, 0)), (_aten.transpose.int, (1, 2)))
    for target, settings in steps:
        if rows.op != "call_function" or rows.target is not target or rows.args[1:] != settings:
            return None, 0, 0
        rows = rows.args[0]
    if rows.target not in _VIEWS or rows.args[0].target is not _aten.slice.Tensor:
        return None, 0, 0
    piece = rows.args[0]
    whole, dimension, start, end = piece.args
    apart, value = rows.meta["val"].shape, piece.meta["val"]
    same = value.dim() == 3 and dimension in (-1, 2) and apart[2] * apart[3] == value.shape[2]
    return (whole, start, min(end, whole.meta["val"].shape[2])) if same else (None, 0, 0)


def _side_by_side(columns: list[tuple[Node | None, int, int]]) -> bool:
    """Whether queries, keys and values are the columns of one value, in this order and without others."""
    whole = columns[0][0]
    if whole is None or any(part is not whole for part, _, _ in columns):
        return False
    edges = [0, *(end for _, _, end in columns)]
    in_order = [start for _, start, _ in columns] == edges[:-1]
    widths = [end - start for _, start, end in columns]
    return in_order and edges[-1] == whole.meta["val"].shape[2] and widths[1] == widths[2]
