"""Decomposes exported graphs operator by operator, so that what a model repeats is traced once.

``ExportedProgram.run_decompositions`` traces the whole graph anew, twice. Here every operator that consists of others
is traced alone, on shapes without data, and the nodes it consists of are kept for all others of the same operator,
shapes, strides and settings: of thirty equal layers, one is traced.
"""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from halfbyte.lowering.writes import without_writes

Table = Mapping[Any, Callable[..., Any]]

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_CHECKED = torch.ops.aten._assert_tensor_metadata.default  # holds for every tensor of an exported graph
_ON_STORAGE = (torch.ops.aten.as_strided.default,)  # of a view it reads what the view is of
_KEPT_META = ("stack_trace", "nn_module_stack", "torch_fn")


def decomposed(entry: ExportedProgram, table: Table, whole: Collection[Any]) -> ExportedProgram:
    """A program of the operators that ``table`` does not decompose; the given one stays as it is.

    Args:
        entry: any exported program.
        table: what operators consist of, ``torch.export.default_decompositions()`` or more.
        whole: composite operators that the table lacks: tracing would take them apart nevertheless.

    Programs that write to tensors in ways that ``without_writes`` does not replace, check values, or hold graphs in
    graphs are traced whole.
    """
    try:
        return _Decomposition(entry, table, whole).program()
    except _TracedWhole:
        with warnings.catch_warnings():
            # torch pickles its own tree specifications in a way it warns about.
            warnings.filterwarnings(
                "ignore", "`isinstance\\(treespec, LeafSpec\\)` is deprecated", FutureWarning
            )
            return entry.run_decompositions(dict(table))


class _TracedWhole(Exception):
    """The program is not one of pure operators on tensors."""


class _Decomposition:
    def __init__(self, entry: ExportedProgram, table: Table, whole: Collection[Any]) -> None:
        self._entry, self._table, self._whole = entry, dict(table), whole
        self._graph = torch.fx.Graph()
        self._made: dict[torch.fx.Node, Any] = {}
        self._pieces: dict[Any, torch.fx.Graph] = {}
        self._sizes: dict[str, torch.fx.Node] = {}

    def program(self) -> ExportedProgram:
        entry, mode = self._entry, _fake_mode(self._entry.graph)
        graph = without_writes(entry.graph, mode)
        for node in graph.nodes:
            self._check(node)
        with mode, torch.no_grad():
            for node in graph.nodes:
                self._made[node] = self._node(node)
        self._graph.eliminate_dead_code()
        signature = copy.deepcopy(entry.graph_signature)
        results: Any = self._graph.output_node().args[0]
        for spec, result in zip(signature.output_specs, results, strict=True):
            if isinstance(result, torch.fx.Node):
                spec.arg.name = result.name
        return ExportedProgram(
            entry.graph_module,
            self._graph,
            signature,
            entry.state_dict,
            entry.range_constraints,
            copy.deepcopy(entry.module_call_graph[:1]),  # how the whole is called; its parts are no more
            entry.example_inputs,
            entry.constants,
        )

    def _check(self, node: torch.fx.Node) -> None:
        value = node.meta.get("val")
        pure = node.op in ("placeholder", "output") or node.target is _CHECKED
        if node.op == "call_function" and not node.is_impure(impure_random=False):
            operators = isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem
            pure = operators or isinstance(value, _SYMBOLIC)
        if not pure or node.target in _ON_STORAGE or free_unbacked_symbols(pytree.tree_leaves(value)):
            raise _TracedWhole

    def _node(self, node: torch.fx.Node) -> Any:
        if node.target is _CHECKED:
            return None
        if node.target is operator.getitem:
            made, index = pytree.tree_map_only(torch.fx.Node, self._made.get, node.args)
            if not isinstance(made, torch.fx.Node):
                return made[index]
        if node.op == "call_function" and isinstance(node.meta.get("val"), _SYMBOLIC):
            return self._size(node, self._made)
        if isinstance(node.target, torch._ops.OpOverload) and node.target not in self._whole:
            return self._inlined(node)
        made = self._graph.node_copy(node, lambda old: self._made[old])
        if (
            node.op == "placeholder"
        ):  # the signature goes by name, and a graph would rename one that is Python's
            made.name = node.name
        return made

    def _size(self, node: torch.fx.Node, made: Mapping[torch.fx.Node, Any]) -> torch.fx.Node:
        """One node for every size, wherever it is asked for."""
        name = str(node.meta["val"].node.expr)
        if name not in self._sizes:
            self._sizes[name] = self._graph.node_copy(node, lambda old: made[old])
        return self._sizes[name]

    def _inlined(self, node: torch.fx.Node) -> Any:
        leaves, spec = pytree.tree_flatten(
            (
                torch.fx.map_arg(node.args, lambda old: self._made[old]),
                torch.fx.map_arg(node.kwargs, lambda old: self._made[old]),
            )
        )
        given = [leaf for leaf in leaves if isinstance(leaf, torch.fx.Node)]
        key = (node.target, str(spec), *map(_description, leaves))
        piece = self._pieces.get(key)
        if piece is None:
            target: Any = node.target
            consists_of_others = target in self._table or target._can_decompose()
            trace = self._traced if consists_of_others else self._alone
            piece = self._pieces[key] = trace(target, leaves, spec)
        places = iter(given)
        made: dict[torch.fx.Node, Any] = {}
        for part in piece.nodes:
            if part.op == "placeholder":
                made[part] = next(places)
            elif part.op == "output":
                return torch.fx.map_arg(part.args[0], lambda old: made[old])
            elif part.op != "call_function":
                raise _TracedWhole  # a tensor that the decomposition holds
            elif isinstance(part.meta.get("val"), _SYMBOLIC):
                made[part] = self._size(part, made)
            else:
                new = made[part] = self._graph.node_copy(part, lambda old: made[old])
                new.meta |= {name: node.meta[name] for name in _KEPT_META if name in node.meta}
        raise AssertionError("a graph without a result")

    def _traced(self, target: Any, leaves: list[Any], spec: pytree.TreeSpec) -> torch.fx.Graph:
        where = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.fx.Node)]

        def call(*values: Any) -> Any:
            filled = list(leaves)
            for index, value in zip(where, values, strict=True):
                filled[index] = value
            args, kwargs = pytree.tree_unflatten(filled, spec)
            return target(*args, **kwargs)

        functional = dispatch_functionalize(call, FunctionalTensorMode())
        values = [_blank(leaves[index].meta["val"]) for index in where]
        with enable_python_dispatcher():
            return make_fx(functional, decomposition_table=self._table)(*values).graph

    def _alone(self, target: Any, leaves: list[Any], spec: pytree.TreeSpec) -> torch.fx.Graph:
        """What tracing an operator that consists of no others gives, at a tenth of the time."""
        graph = torch.fx.Graph()
        args, kwargs = pytree.tree_unflatten(
            [graph.placeholder("x") if isinstance(leaf, torch.fx.Node) else leaf for leaf in leaves], spec
        )
        given, named = pytree.tree_unflatten(
            [leaf.meta["val"] if isinstance(leaf, torch.fx.Node) else leaf for leaf in leaves], spec
        )
        made = graph.call_function(target, args, kwargs)
        with enable_python_dispatcher():
            made.meta["val"] = value = target(*given, **named)
        results: Any = made
        if isinstance(value, tuple | list):
            results = tuple(graph.call_function(operator.getitem, (made, i)) for i in range(len(value)))
            for result, part in zip(results, value, strict=True):
                result.meta["val"] = part
        graph.output(results)
        return graph


def _blank(value: Any) -> Any:
    """A tensor of its own: tracing tells arguments apart by identity, and equal nodes share what they stand for."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _description(leaf: Any) -> Any:
    """What of an argument decides how an operator decomposes."""
    if not isinstance(leaf, torch.fx.Node):
        return type(leaf), str(leaf)
    value = leaf.meta["val"]
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device, *(tuple(map(str, part)) for part in (value.shape, value.stride()))
    return type(value), str(value)


def _fake_mode(graph: torch.fx.Graph) -> FakeTensorMode:
    for node in graph.nodes:
        if isinstance(value := node.meta.get("val"), FakeTensor):
            return value.fake_mode
    raise _TracedWhole
