"""Finds RMSNorms that stand by themselves and rewrites them as ``halfbyte::rms_norm``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from halfbyte.passes.graph_patterns import calls, erase_unused, itself, module_path, new_call, only_user
from halfbyte.passes.norm_pattern import Norm, left_norms, norm_of, obstacle
from halfbyte.passes.program import Program, drop_dead_state, replace

_aten: Any = torch.ops.aten
_ops: Any = torch.ops.halfbyte
_VIEWS = (_aten.view.default, _aten.reshape.default, _aten.unflatten.int)
DONE = "halfbyte::rms_norm"


@dataclass(frozen=True)
class FindNorms:
    """RMSNorms over the last dimension that no linear is fused with: of queries and keys, before a float head.

    Heads are normed where a merged linear left them, and of rows of which one is picked only that one. What looks
    like a norm and matches no form that is known stays as it is, and the report says why.
    """

    name: str = "find-norms"

    def run(self, program: Program) -> int:
        found = 0
        for entry in program.entries.values():
            drop_dead_state(entry)
            places = []
            for node in reversed(list(entry.graph.nodes)):
                norm = norm_of(node) if node.users and itself(node) is node else None
                if norm is not None:
                    places.append(module_path(node) or node.name)
                    _rewrite(entry, node, norm)
            for place in reversed(places):
                program.report.norms.setdefault(place, DONE)
            found += len(places)
            drop_dead_state(entry)
            for node in left_norms(entry.graph):
                program.report.norms[module_path(node) or node.name] = f"stays as it is: {obstacle(node)}"
        return found


@dataclass(frozen=True)
class NormsAsBefore:
    """What `FindNorms` says of a program, for graphs in which it is done already."""

    norms: Mapping[str, str]
    name: str = FindNorms.name

    def run(self, program: Program) -> int:
        program.report.norms.update(self.norms)
        return len(self.norms)


def _rewrite(entry: ExportedProgram, node: Node, norm: Norm) -> None:
    """Of several rows of which the only user picks one, that one alone is normed."""
    x, last, picked = norm.x, node, only_user(node)
    if picked is not None and calls(picked, _aten.select.int) and _of_rows(picked):
        last = node if node.meta["val"].shape[picked.args[1]] == 1 else picked
    with entry.graph.inserting_before(last):
        if last is not node:
            x = new_call(entry.graph, _aten.select.int, x, *last.args[1:])
        made = _normed(entry.graph, x, norm)
    before = last.all_input_nodes
    replace(entry, last, made)
    for unused in before:
        erase_unused(unused)


def _of_rows(node: Node) -> bool:
    """Whether a ``select`` or ``transpose`` leaves the last dimension where it is."""
    dimensions = node.args[1:] if node.target is _aten.transpose.int else node.args[1:2]
    last = node.args[0].meta["val"].dim() - 1  # type: ignore[union-attr]
    return all(dimension not in (-1, last) for dimension in dimensions)


def _normed(graph: torch.fx.Graph, x: Node, norm: Norm) -> Node:
    """The norm of x, of what x is a transposition of, or of the columns that x is a view of."""
    x = itself(x)
    if calls(x, _aten.transpose.int) and _of_rows(x):
        before: Any = x.args[0]
        return new_call(graph, _aten.transpose.int, _normed(graph, before, norm), *x.args[1:])
    settings = (norm.weight, norm.eps, norm.plus_one, norm.rounds)
    width = x.meta["val"].shape[-1]
    piece = itself(x.args[0]) if calls(x, *_VIEWS) and _splits_heads(x) else x
    if not _cuts_columns(piece):
        return new_call(graph, _ops.rms_norm.default, x, *settings)
    whole, _, first = piece.args[:3]
    heads = piece.meta["val"].shape[-1] // width
    out = new_call(graph, _ops.rms_norm_merged.default, whole, first, heads, width, *settings)
    return out if piece is x else new_call(graph, _aten.unflatten.int, out, -1, [heads, width])


def _splits_heads(view: Node) -> bool:
    """Whether a view only takes the last dimension apart."""
    before: Any = view.args[0]
    wide, apart = before.meta["val"].shape, view.meta["val"].shape
    same = len(apart) == len(wide) + 1 and list(map(str, wide[:-1])) == list(map(str, apart[:-2]))
    return same and isinstance(apart[-2], int) and apart[-2] * apart[-1] == wide[-1]


def _cuts_columns(piece: Any) -> bool:
    """Whether it is columns, side by side, of something wider."""
    return (
        calls(piece, _aten.slice.Tensor)
        and piece.args[1] in (-1, piece.args[0].meta["val"].dim() - 1)
        and piece.args[4:] in ((), (1,))
        and isinstance(piece.args[2], int)
        and piece.args[2] >= 0
    )
