"""A program: its entry points as exported graphs, and where the values of its state come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

import halfbyte.passes.ops  # noqa: F401  registers torch.ops.halfbyte
from halfbyte.passes.graph_patterns import fake_mode
from halfbyte.passes.report import Report
from halfbyte.passes.weight import Fp8Tensor, QuantTensor


@dataclass(frozen=True)
class LayerSource:
    """Where a quantized layer's weight comes from: read (or joined) when it is needed, not before.

    Attributes:
        weight: gives the weight.
        bias: gives the bias, float [N], or None.
        members: the layers this one was merged from, in column order; the layer itself if it was not.
    """

    weight: Callable[[], QuantTensor | Fp8Tensor]
    bias: Callable[[], torch.Tensor] | None
    members: tuple[str, ...]


@dataclass(frozen=True)
class ExpertsSource:
    """Where the weights of a layer of experts come from: expert by expert, when they are needed.

    Attributes:
        experts: their number.
        gate, up, down: give the linear of an expert.
    """

    experts: int
    gate: Callable[[int], LayerSource]
    up: Callable[[int], LayerSource]
    down: Callable[[int], LayerSource]

    def members(self) -> Iterator[str]:
        """The linears of all experts, by their names in the checkpoint."""
        for expert in range(self.experts):
            for linear in (self.gate, self.up, self.down):
                yield from linear(expert).members


@dataclass(frozen=True)
class TensorSource:
    """Where any other tensor comes from.

    Attributes:
        key: its name in the archive; tied tensors share one.
        load: reads it.
    """

    key: str
    load: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Merge:
    """Layers that became one: their names in `Program.layers`, in column order, and their outputs together."""

    members: tuple[str, ...]
    outputs: int


@dataclass
class Program:
    """What the passes work on.

    Attributes:
        entries: exported graphs by entry point; they share state by name.
        layers: by the name of the layer, the weights behind `layer_nodes`. A node's codes are the state
            ``<layer>.codes``, its scales ``<layer>.scale`` and so on.
        experts: by the name of a block's experts, the weights behind a ``halfbyte::moe`` node, whose codes are the
            state ``<name>.up_codes`` and so on.
        tensors: by state name, every other tensor. State found in neither is taken from the graphs themselves.
        merges: the layers among ``layers`` that were made of others there.
        empty: the state of the graphs has no values (they come from ``layers`` and ``tensors``): nothing may
            read it, and copies of it would cost memory for nothing.
        report: rows of what was done.
    """

    entries: dict[str, ExportedProgram]
    layers: dict[str, LayerSource] = field(default_factory=dict)
    experts: dict[str, ExpertsSource] = field(default_factory=dict)
    tensors: dict[str, TensorSource] = field(default_factory=dict)
    merges: dict[str, Merge] = field(default_factory=dict)
    empty: bool = False
    report: Report = field(default_factory=Report)


def layer_nodes(graph: torch.fx.Graph) -> Iterator[torch.fx.Node]:
    """The ``halfbyte::linear`` and ``halfbyte::fp8_block_linear`` nodes of a graph, in order."""
    targets = (torch.ops.halfbyte.linear.default, torch.ops.halfbyte.fp8_block_linear.default)
    return (node for node in list(graph.nodes) if node.op == "call_function" and node.target in targets)


def state_names(program: ExportedProgram) -> dict[str, str]:
    """Placeholder name -> state name, for parameters, buffers and lifted constants."""
    signature = program.graph_signature
    return {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }


def state_value(program: ExportedProgram, name: str) -> torch.Tensor:
    """The tensor behind a state name."""
    value: Any = program.state_dict.get(name)
    return program.constants[name] if value is None else value


def add_state(program: ExportedProgram, name: str, value: torch.Tensor) -> torch.fx.Node:
    """Adds a buffer to an exported program and returns its placeholder, marked in ``meta`` as ours.

    A state of that name that the program brought along gets another: a module of the user may well call its
    buffers ``codes`` or ``bias``.
    """
    graph = program.graph
    _make_way(program, name)
    label, taken = (
        "b_" + "".join(c if c.isalnum() else "_" for c in name),
        {node.name for node in graph.nodes},
    )
    while label in taken:  # torch names placeholders behind the back of the graph's own bookkeeping
        label += "_"
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        node = graph.placeholder(label)
    node.meta["val"] = fake_mode(graph).from_tensor(value, static_shapes=True)
    node.meta["halfbyte"] = True
    spec = InputSpec(InputKind.BUFFER, TensorArgument(node.name), name, persistent=True)
    program.graph_signature.input_specs.insert(0, spec)
    program.state_dict[name] = value
    return node


def added_state(program: ExportedProgram) -> dict[str, torch.fx.Node]:
    """State name -> placeholder, for what `add_state` added."""
    names = state_names(program)
    nodes = (node for node in program.graph.nodes if node.op == "placeholder" and "halfbyte" in node.meta)
    return {names[node.name]: node for node in nodes}


def _make_way(program: ExportedProgram, name: str) -> None:
    taken = {spec.target for spec in program.graph_signature.input_specs}
    if name not in taken:
        return
    other = f"{name}_given"
    while other in taken:
        other += "_"
    for spec in (*program.graph_signature.input_specs, *program.graph_signature.output_specs):
        if spec.target == name:
            spec.target = other
    for values in (program.state_dict, program.constants):
        if name in values:
            values[other] = values.pop(name)


def drop_dead_state(program: ExportedProgram) -> None:
    """Removes nodes nobody uses, and then parameters, buffers and constants nobody reads."""
    graph, specs = program.graph, program.graph_signature.input_specs
    for node in list(graph.nodes):  # checks that hold for every tensor of an exported graph keep state alive
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)
    graph.eliminate_dead_code()
    names = state_names(program)
    for node in list(graph.nodes):
        if node.op == "placeholder" and node.name in names and not node.users:
            specs.remove(next(spec for spec in specs if spec.arg.name == node.name))
            program.state_dict.pop(names[node.name], None)
            program.constants.pop(names[node.name], None)
            graph.erase_node(node)
    program.graph_module.recompile()


def replace(program: ExportedProgram, old: torch.fx.Node, new: torch.fx.Node) -> None:
    """Replaces every use of a node, in the signature of the outputs too (those go by name)."""
    new.meta.setdefault("val", old.meta.get("val"))
    old.replace_all_uses_with(new)
    program.graph_signature.replace_all_uses(old.name, new.name)
    program.graph.erase_node(old)


def integer_weight(source: LayerSource) -> QuantTensor:
    """The weight behind a ``halfbyte::linear``."""
    weight = source.weight()
    assert isinstance(weight, QuantTensor)
    return weight
