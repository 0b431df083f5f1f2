"""What patterns in graphs are made of: copies that change nothing, operands in either order, nodes made anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, Node

_aten: Any = torch.ops.aten
CASTS = (
    *(_aten.to.dtype, _aten.to.dtype_layout, _aten.to.device),
    *(_aten._to_copy.default, _aten.type_as.default),
)
_SAME = (*CASTS, _aten.alias.default, _aten.dropout.default)
# What moves values about and changes none.
RESHAPES = (
    _aten.t.default,
    _aten.numpy_T.default,
    _aten.transpose.int,
    _aten.permute.default,
    _aten.view.default,
    _aten.reshape.default,
    _aten._unsafe_view.default,
    _aten.flatten.using_ints,
    _aten.unsqueeze.default,
    _aten.squeeze.dim,
    _aten.expand.default,
    _aten.contiguous.default,
    _aten.clone.default,
    _aten.alias.default,
    _aten.detach.default,
    _aten.detach_.default,
)


def calls(node: Any, *targets: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def operator_name(node: Any) -> str:
    """E.g. ``torchao.quantize_affine``: such operators exist only where their library is loaded."""
    target = node.target if isinstance(node, Node) and node.op == "call_function" else None
    return f"{target.namespace}.{target._opname}" if isinstance(target, torch._ops.OpOverload) else ""


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of an operator by name, defaults too."""
    schema: Any = node.target
    names = [argument.name for argument in schema._schema.arguments]
    defaults = {
        part.name: part.default_value for part in schema._schema.arguments if part.has_default_value()
    }
    return {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}


def strip(node: Any) -> tuple[Any, list[Node]]:
    """Follows reshapes and casts back to what they reshape; also gives the nodes passed, last first."""
    passed = []
    while calls(node, *RESHAPES, *CASTS):
        passed.append(node)
        node = node.args[0]
    return node, passed


def itself(node: Any) -> Any:
    """What a node is a copy of, if it changes nothing."""
    while calls(node, *_SAME):
        before = node.args[0]
        drops = node.target is _aten.dropout.default and node.args[2]
        if drops or before.meta["val"].dtype != node.meta["val"].dtype:
            break
        node = before
    return node


def only_user(node: Node) -> Node | None:
    """The one node that uses a value, behind copies that change nothing."""
    while len(node.users) == 1:
        [user] = node.users
        if itself(user) is user:
            return user
        node = user
    return None


def factors(node: Any, target: Any) -> list[tuple[Any, Any]]:
    """Both operands of a commutative operator, either of them first."""
    if not calls(node, target) or len(node.args) != 2 or node.kwargs:
        return []
    a, b = map(itself, node.args)
    return [(a, b), (b, a)]


def fake_mode(graph: Graph) -> FakeTensorMode:
    """The mode that the values of an exported graph's nodes are of."""
    values = (node.meta.get("val") for node in graph.nodes)
    return next(value for value in values if isinstance(value, FakeTensor)).fake_mode


def new_call(graph: Graph, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
    """A node at the graph's insertion point, with the value it has in shapes."""
    made = graph.call_function(target, args, kwargs)
    with fake_mode(graph):
        known: Any = torch.fx.node.map_arg((args, kwargs), lambda part: part.meta["val"])
        made.meta["val"] = target(*known[0], **known[1])
    return made


def erase_unused(node: Node) -> None:
    """Erases a call that nobody uses, and what it alone used."""
    if node.op == "call_function" and not node.users:
        before = node.all_input_nodes
        node.graph.erase_node(node)
        for other in before:
            erase_unused(other)


def module_path(node: Node) -> str:
    """The module of the model that a node is in, or nothing."""
    stack = node.meta.get("nn_module_stack") or {}
    return next((path for path, _ in reversed(list(stack.values())) if path), "")
