"""Exports modules and looks at what a rewrite made of them."""

from __future__ import annotations

import functools

import torch
from numpy_twin import Array
from torch.export import Dim, ExportedProgram
from torch_bridge import array, tensor

from halfbyte.passes.program import Program


class Named(torch.nn.Module):
    """Gives linears names; each reads the input."""

    def __init__(self, **layers: torch.nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        results = tuple(layer(x) for layer in self.children())
        return results[0] if len(results) == 1 else results


def export(
    module: torch.nn.Module, x: Array, *, decomposed: bool = False, rows: bool = True
) -> ExportedProgram:
    """An exported program, with a varying number of rows if asked for."""
    shapes = ({0: Dim("T", min=1, max=4096)},) if rows else None
    with torch.no_grad():
        program = torch.export.export(module.eval(), (tensor(x),), dynamic_shapes=shapes, strict=False)
    return program.run_decompositions(core_operators()) if decomposed else program


# torch looks through all of its operators for it.
core_operators = functools.cache(torch.export.default_decompositions)


def linears(program: Program, entry: str = "forward") -> list[torch.fx.Node]:
    nodes = program.entries[entry].graph.nodes
    return [node for node in nodes if node.target is torch.ops.halfbyte.linear.default]


def float_products(program: Program) -> list[str]:
    """Matrix products of aten that are left."""
    named = {"mm", "addmm", "matmul", "linear", "bmm"}
    targets = [str(node.target) for node in program.entries["forward"].graph.nodes]
    return [target for target in targets if target.startswith("aten.") and target.split(".")[1] in named]


def state(program: Program, name: str) -> Array | None:
    """A tensor of the program's state by its full name."""
    value = program.entries["forward"].state_dict.get(name)
    return None if value is None else array(value)


def run(program: Program, x: Array) -> Array:
    return array(program.entries["forward"].module()(tensor(x)))


def run_all(program: Program, x: Array) -> list[Array]:
    return [array(value) for value in program.entries["forward"].module()(tensor(x))]
