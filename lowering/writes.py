"""Writes to tensors in place as values of their own, so that a graph is one of pure operators.

transformers' models write to tensors that they have just made: weights of experts divided by their sum, masks
scattered into zeros, keys put together by parts. ``x.div_(y)`` becomes ``x.div(y)``, which what follows then reads;
a write to a slice becomes a new whole. Where other views of the tensor are read afterwards, the write stays.
"""

from __future__ import annotations

import copy
import operator
from itertools import pairwise
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

_aten = torch.ops.aten
# Views that can be written back to what they are of.
_SCATTERS: dict[Any, Any] = {
    _aten.slice.Tensor: _aten.slice_scatter.default,
    _aten.select.int: _aten.select_scatter.default,
}


def without_writes(graph: Graph, mode: FakeTensorMode) -> Graph:
    """The graph if it writes to nothing, or a copy without the writes that are understood."""
    if not any(_writes(node) for node in graph.nodes):
        return graph
    graph = copy.deepcopy(graph)
    for node in list(graph.nodes):
        if _writes(node):
            _replace(node, mode)
    return graph


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _replace(write: Node, mode: FakeTensorMode) -> None:
    functional, path = _functional(write.target), _path(write.args[0])
    if functional is None or path is None:
        return
    others = [view for view in _views(path[-1]) - set(path) if view < write]
    if any(user > write for view in others for user in view.users):
        return
    graph, written = write.graph, path[0]

    def call(target: Any, *args: Any, **settings: Any) -> Node:
        new = graph.call_function(target, args, settings)
        values = torch.fx.map_arg((args, settings), lambda node: node.meta["val"])
        with mode, torch.no_grad():
            new.meta = {**write.meta, "val": target(*values[0], **values[1])}
        return new

    with graph.inserting_before(write):
        value = call(functional, *write.args, **write.kwargs)
        if value.meta["val"].dtype != written.meta["val"].dtype:
            value = call(_aten.to.dtype, value, written.meta["val"].dtype)
        for view, of in pairwise(path):
            value = call(_SCATTERS[view.target], of, value, *view.args[1:], **view.kwargs)
        # Views of the new whole, so that writes to them later reach it too.
        now = [value]
        for view in reversed(path[:-1]):
            now.append(call(view.target, now[-1], *view.args[1:], **view.kwargs))
    for old, new in zip(reversed(path), now, strict=True):
        for user in [user for user in old.users if user > write]:
            user.replace_input_with(old, new)
    write.replace_all_uses_with(now[-1])
    graph.erase_node(write)


def _functional(target: Any) -> Any:
    """The operator that gives what ``target`` writes to its first argument, and to no other; None without one."""
    schema = target._schema
    name = schema.name.removeprefix("aten::")
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    # One that turns or resizes the tensor itself leaves what it is a part of as it was.
    values_alone = torch.Tag.inplace_view not in target.tags or target is _aten.detach_.default
    if target.namespace != "aten" or not values_alone or written != [True, *[False] * (len(written) - 1)]:
        return None
    packet = getattr(_aten, name.removesuffix("_"), None) if name.endswith("_") else None
    return getattr(packet, schema.overload_name or "default", None)


def _path(written: Any) -> list[Node] | None:
    """From what is written, view by view, to the tensor of its own that it lies in; None where that is not known."""
    path: list[Node] = [written]
    while path[-1].target in _SCATTERS:
        path.append(_first(path[-1]))
    made = path[-1]
    if made.target is operator.getitem:
        made = _first(made)
    return path if isinstance(made.target, torch._ops.OpOverload) and not _may_alias(made) else None


def _views(node: Node) -> set[Node]:
    """The tensor and all that may share its memory."""
    found, waiting = {node}, [node]
    if node.target is operator.getitem:
        waiting = [twin for twin in _first(node).users if twin.args == node.args]
        found.update(waiting)
    while waiting:
        for user in waiting.pop().users:
            if user not in found and (user.target is operator.getitem or _may_alias(user)):
                found.add(user)
                waiting.append(user)
    return found


def _first(node: Node) -> Node:
    argument = node.args[0]
    assert isinstance(argument, Node)
    return argument


def _may_alias(node: Node) -> bool:
    """Whether a result may share memory with an argument: composite operators need not say so."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.op == "call_function"
    composite = node.target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return composite or any(result.alias_info is not None for result in node.target._schema.returns)
