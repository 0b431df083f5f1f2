"""Exports a user's module; transformers' modules of experts among its parts get a form that can be exported."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from halfbyte.errors import UnsupportedLayerError

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram


def export_module(model: torch.nn.Module, example: tuple[Any, ...], dynamic_shapes: Any) -> ExportedProgram:
    """``torch.export.export`` of a module in eval mode.

    transformers computes experts by a loop over those that the tokens chose; while the module is exported, they all
    compute all tokens, and a token's own count.

    Raises:
        UnsupportedLayerError: what the module does depends on the values of tensors, for instance by such a loop
            of its own.
    """
    import torch
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    try:
        with torch.no_grad(), _experts_without_loops(model.eval()):
            return torch.export.export(model, example, dynamic_shapes=dynamic_shapes, strict=False)
    except GuardOnDataDependentSymNode as error:
        raise UnsupportedLayerError(
            "the module decides by the values of tensors what it computes, so it is no graph",
            where=type(model).__name__,
            found=str(error).splitlines()[0][:300],
            accepted="the same operations whatever the values",
            advice="a loop over the experts that tokens chose (nonzero): let every expert compute all tokens and take "
            "those that chose it by torch.where, or call torch.ops.halfbyte.moe",
        ) from error


@contextlib.contextmanager
def _experts_without_loops(model: torch.nn.Module) -> Iterator[None]:
    from halfbyte.checkpoints.expert_layers import float_experts
    from halfbyte.checkpoints.experts import ExpertsShape

    kept = []
    for path, module in list(model.named_modules()):
        if path and ExpertsShape.of(module) is not None and hasattr(module, "_apply_gate"):
            with contextlib.suppress(UnsupportedLayerError):
                parent, _, leaf = path.rpartition(".")
                kept.append((model.get_submodule(parent), leaf, module))
                setattr(model.get_submodule(parent), leaf, float_experts(path, module))
    try:
        yield
    finally:
        for owner, leaf, module in kept:
            setattr(owner, leaf, module)
