"""Evaluates the part of a graph that depends on parameters, buffers and constants alone."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram

from halfbyte.passes.program import state_names, state_value


class StateEval:
    """Calls with a node give its value, or None where it depends on an input of the program.

    Values are kept per node, so a subgraph is evaluated once; use one object per rewrite and let it go.
    """

    def __init__(self, program: ExportedProgram) -> None:
        names = state_names(program)
        self._memo: dict[torch.fx.Node, Any] = {}
        for node in program.graph.nodes:
            if node.op == "placeholder":
                known = node.name in names
                # A parameter is one to be trained until it is detached.
                self._memo[node] = state_value(program, names[node.name]).detach() if known else None

    def known(self, node: object) -> bool:
        """Whether a node (or a plain value) has a value."""
        return not isinstance(node, torch.fx.Node) or self(node) is not None

    def __call__(self, node: torch.fx.Node) -> Any:
        if node not in self._memo:
            self._memo[node] = self._evaluate(node)
        return self._memo[node]

    def _evaluate(self, node: torch.fx.Node) -> Any:
        if node.op != "call_function" or not all(self.known(source) for source in node.all_input_nodes):
            return None
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self)
        with torch.no_grad():
            return node.target(*args, **kwargs)  # type: ignore[operator]
