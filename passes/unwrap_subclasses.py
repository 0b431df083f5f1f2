"""Puts the plain tensors inside of tensor subclasses, torchao's quantized weights, in their place in the state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.export import ExportedProgram

from halfbyte.passes.program import (
    Program,
    add_state,
    added_state,
    drop_dead_state,
    replace,
    state_names,
    state_value,
)
from halfbyte.passes.report import Refusal

_INNER = torch.ops.export.access_subclass_inner_tensor.default


@dataclass(frozen=True)
class UnwrapSubclasses:
    """A ``layer.weight`` that holds ``qdata`` and ``scale`` becomes ``layer.weight_qdata`` and ``layer.weight_scale``.

    A graph reads such a weight through ``export.access_subclass_inner_tensor``. Subclasses in subclasses are taken
    apart to the innermost.
    """

    name: str = "unwrap-subclasses"

    def run(self, program: Program) -> int:
        changed = 0
        for entry in program.entries.values():
            changed += _unwrap(entry)
            program.report.refusals += [_refusal(name) for name in _left(entry)]
        return changed


def _unwrap(entry: ExportedProgram) -> int:
    changed, placed = 0, added_state(entry)
    for node in [node for node in entry.graph.nodes if node.target is _INNER]:
        source, names = node.args[0], state_names(entry)  # of what was unwrapped before, too
        if not isinstance(source, torch.fx.Node) or source.name not in names:
            continue
        inner = getattr(state_value(entry, names[source.name]), str(node.args[1]))
        name = f"{names[source.name]}_{node.args[1]}"
        if name not in placed:
            placed[name] = add_state(entry, name, inner.detach())
        replace(entry, node, placed[name])
        changed += 1
    if changed:
        drop_dead_state(entry)
    return changed


def _left(entry: ExportedProgram) -> list[str]:
    names = state_names(entry)
    return [
        name
        for node, name in names.items()
        if torch.utils._python_dispatch.is_traceable_wrapper_subclass(state_value(entry, name))
        and any(other.name == node and other.users for other in entry.graph.nodes)
    ]


def _refusal(name: str) -> Refusal:
    return Refusal(
        name,
        "a tensor subclass that the graph uses whole",
        "subclasses that torch.export takes apart",
        "unwrap it before the export (torchao.utils.unwrap_tensor_subclass)",
    )
