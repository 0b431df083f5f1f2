"""Fuses quantized linears with the norm before them and with what becomes of their results: ``fused_linear``."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from halfbyte.passes.graph_patterns import calls, factors, itself, only_user
from halfbyte.passes.norm_pattern import Norm, norm_of
from halfbyte.passes.program import Program, drop_dead_state, layer_nodes, replace, state_names

_aten: Any = torch.ops.aten
_LINEAR = torch.ops.halfbyte.linear.default
_FUSED = torch.ops.halfbyte.fused_linear.default
# Arguments of a linear before those that come last in both.
_OWN = len(_LINEAR._schema.arguments) - 2
_NAMES = {"silu": "SwiGLU", "gelu_tanh": "GeGLU"}
_HALVES = (_aten.chunk.default, _aten.split.Tensor, _aten.split_with_sizes.default)


@dataclass(frozen=True)
class FuseLinears:
    """RMSNorm into the dispatch that quantizes the activations; SwiGLU or the residual's addition into the GEMM.

    Each gives the bits of the reference of the pair (`passes.ops.rms_norm`, `swiglu`), which differ from torch's own
    norm, SiLU and GELU by roundings. Layers with e4m3 weights and activations of 16 bits stay as they are, and so
    does what is used by others too.

    Attributes:
        norm, glu, residual: which of them are fused.
    """

    norm: bool = True
    glu: bool = True
    residual: bool = True
    name: str = "fuse-linears"

    def run(self, program: Program) -> int:
        for entry in program.entries.values():
            names = state_names(entry)
            for node in layer_nodes(entry.graph):
                layer = names.get(_name(node, 1), "").removesuffix(".codes")
                if layer not in program.layers or node.target is not _LINEAR:
                    continue
                found = _Around.of(node, self)
                if found.parts:
                    _fuse(entry, node, found)
                if found.parts or found.left:
                    program.report.fused[layer] = ", ".join([*found.parts, *found.left])
            drop_dead_state(entry)
        return len(program.report.fused)


@dataclass(frozen=True)
class FusedAsBefore:
    """What `FuseLinears` says of a program, for graphs in which it is done already."""

    fused: Mapping[str, str]
    name: str = FuseLinears.name

    def run(self, program: Program) -> int:
        program.report.fused.update(self.fused)
        return len(self.fused)


@dataclass
class _Around:
    """What a linear can be fused with.

    Attributes:
        x: what it reads then, or what its row is picked of.
        picked: the ``select`` between a norm and the linear (the last token's row), or None.
        norm: its weight, eps, and whether one is added to the weight.
        glu: the product of the halves of its outputs.
        residual: what is added to them.
        last: the node whose value the fused operator gives.
        parts: the same in words.
        left: what could not be fused, and why.
    """

    x: Node
    last: Node
    picked: Node | None = None
    norm: tuple[Node | None, float, bool] = (None, 0.0, False)
    glu: str = ""
    residual: Node | None = None
    parts: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, node: Node, chosen: FuseLinears) -> _Around:
        x: Any = node.args[0]
        found = cls(x, node)
        if x.meta["val"].dtype != torch.float32:
            return found
        if chosen.norm and (normed := _norm(x)) is not None:
            found.x, found.norm = normed.x, (normed.weight, normed.eps, normed.plus_one)
            found.picked = x if _picks(x) else None
            found.parts.append("RMSNorm before")
        product, outputs = _glu(node) if chosen.glu else None, node.meta["val"].shape[-1]
        if product is not None and outputs % 128:
            kind, width = _NAMES[product[0]], outputs // 2
            found.left.append(f"{kind} by IREE: {width} outputs of gate are no whole blocks of 64")
        elif product is not None:
            found.glu, found.last = product
            found.parts.append(f"{_NAMES[found.glu]} after")
        elif chosen.residual and (added := _residual(node)) is not None:
            found.residual, found.last = added
            found.parts.append("residual added after")
        return found


def _fuse(entry: ExportedProgram, node: Node, found: _Around) -> None:
    with entry.graph.inserting_before(found.last):
        x = found.x
        if found.picked is not None:
            x = entry.graph.call_function(_aten.select.int, (x, *found.picked.args[1:]))
            x.meta = dict(found.picked.meta)
        own, last = node.args[1:_OWN], node.args[_OWN:]  # levels and fixed, which may be left out
        arguments = (x, *own, *found.norm, found.glu, found.residual, *last)
        fused = entry.graph.call_function(_FUSED, arguments)
    fused.meta = dict(node.meta, val=found.last.meta["val"])
    replace(entry, found.last, fused)
    if found.last is not node:
        _erase(node)


def _erase(node: Node) -> None:
    """Erases a value that leads to nothing any more; a dropout would stay, being random where it is not off."""
    for user in list(node.users):
        _erase(user)
    node.graph.erase_node(node)


def _name(node: Node, position: int) -> str:
    argument: Any = node.args[position]
    return str(argument.name)


# ---------------------------------------------------------------- before


def _norm(x: Any) -> Norm | None:
    """The norm in float32 that x, or what x is a row of, is; None if it is none, or others use it."""
    if any(user.target is not _LINEAR or user.args[0] is not x for user in x.users):
        return None
    rows = x.args[0] if _picks(x) else x
    normed = itself(rows)
    if normed is not x and len(normed.users) > 1:
        return None
    norm = norm_of(normed)
    return norm if norm is not None and _is_parameter(norm.weight) else None


def _picks(x: Any) -> bool:
    """Whether it is one row, or some, of something whose rows are normed one by one."""
    return calls(x, _aten.select.int) and x.args[1] not in (-1, x.args[0].meta["val"].dim() - 1)


def _is_parameter(weight: Any) -> bool:
    return weight is not None and weight.op == "placeholder" and weight.meta["val"].dtype == torch.float32


# ---------------------------------------------------------------- after


def _glu(node: Node) -> tuple[str, Node] | None:
    """The kind of the product of a linear's halves, and the node that computes it."""
    halves = _halves(node, node.meta["val"].shape[-1])
    if halves is None:
        return None
    gate, up = halves
    curved = only_user(gate)
    if calls(curved, _aten.silu.default):
        kind = "silu"
    elif calls(curved, _aten.gelu.default) and curved.kwargs.get("approximate") == "tanh":  # type: ignore[union-attr]
        kind = "gelu_tanh"
    else:
        return None
    assert curved is not None
    product = only_user(curved)
    whole = product is not None and any(
        a is curved and b is up for a, b in factors(product, _aten.mul.Tensor)
    )
    return (kind, product) if whole and only_user(up) is product else None  # type: ignore[return-value]


def _halves(node: Node, outputs: int) -> tuple[Node, Node] | None:
    """The first and the second half of a value's last dimension, if nobody uses anything else of it."""
    found: dict[int, Node] = {}
    last = node.meta["val"].dim() - 1
    users = list(node.users)
    if len(users) == 1 and calls(users[0], *_HALVES):
        parts = list(users[0].users)
        if all(calls(part, operator.getitem) for part in parts) and users[0].meta["val"][0].dim() == last + 1:
            found = {int(part.args[1]): part for part in parts}  # type: ignore[arg-type]
    elif all(calls(user, _aten.slice.Tensor) and user.args[1] in (-1, last) for user in users):
        for user in users:
            start: Any = user.args[2]
            found[2 * start // outputs] = user
    sizes = [part.meta["val"].shape[-1] for part in found.values()]
    if sorted(found) != [0, 1] or sizes != [outputs // 2] * 2 or outputs % 2:
        return None
    return found[0], found[1]


def _residual(node: Node) -> tuple[Node, Node] | None:
    """What is added to a linear's results, and the sum."""
    total = only_user(node)
    for a, b in factors(total, _aten.add.Tensor):
        if a is node and b is not node and isinstance(b, Node):
            mine, other = node.meta["val"], b.meta["val"]
            if mine.dtype == other.dtype and str(mine.shape) == str(other.shape):
                assert total is not None
                return b, total
    return None
