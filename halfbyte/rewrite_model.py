"""Rewrites a user's graph: dequantized linears, causal attention and RMSNorms become operators of halfbyte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

    from halfbyte.passes.pipeline import Hook
    from halfbyte.passes.program import Program


def rewrite(
    model: ExportedProgram | torch.nn.Module,
    example: tuple[Any, ...] | None = None,
    *,
    dynamic_shapes: Any = None,
    activations: str | None = None,
    min_tokens: int = 0,
    entry: str = "forward",
    hooks: Sequence[Hook] = (),
) -> Program:
    """Finds quantized linears in a graph and rewrites them.

    Linears whose weight the graph computes from state as (codes - zero) * scale, however the codes are packed
    and the inputs ordered, become one ``halfbyte::linear`` each (with e4m3 codes ``halfbyte::fp8_block_linear``);
    those that read the same input become one. So do those that torchao (``quantize_``) or PyTorch 2 export
    quantization (``convert_pt2e``, exported again) made, weights in torchao's tensor subclasses too.
    Causal attention of one sequence (torch's ``scaled_dot_product_attention``) becomes ``halfbyte::attention``,
    an RMSNorm ``halfbyte::rms_norm``.
    The result runs eagerly (``program.entries["forward"].module()``) with the operators' reference semantics,
    and `halfbyte.compile` takes it. ``program.report`` has a row for every linear and every refusal.

    Args:
        model: an ExportedProgram, or a module to export with ``example`` and ``dynamic_shapes``. The
            ExportedProgram is changed in place.
        example: positional inputs for the export of a module.
        dynamic_shapes: as for torch.export.export.
        activations: ``none`` (W4A16), ``int8`` (W4A8) or ``fp8`` (W4AFP8), for every linear found, whatever the
            graph does to its input; also ``int8_affine``, ``int8_affine_f32``, ``int8_affine_f64`` or
            ``int8_symmetric``, which are W4A8 as torchao and torch round. None: where the graph rounds the input to
            int8 per token or with a fixed scale, so does the kernel, to the same codes (where it cannot, by ``int8``,
            and a warning says so); any other rounding, one per tensor or group, stays in the graph, and the kernel
            takes its result as it is; and where the graph rounds nothing, ``none``.
        min_tokens: see ``halfbyte::linear``.
        entry: name of the entry point.
        hooks: called after every pass with the pass and the program.

    Raises:
        UsageError: a module without example inputs, or an unknown kind of activations.
        UnsupportedLayerError: what a module computes depends on the values of its inputs.
    """
    import torch

    from halfbyte.errors import UsageError
    from halfbyte.export_module import export_module
    from halfbyte.passes.find_attention import FindAttention
    from halfbyte.passes.find_dequantized_linears import FindDequantizedLinears
    from halfbyte.passes.find_norms import FindNorms
    from halfbyte.passes.merge_linears import MergeLinears
    from halfbyte.passes.pipeline import Pass, run_passes
    from halfbyte.passes.program import Program
    from halfbyte.passes.scheme import Activations
    from halfbyte.passes.unwrap_subclasses import UnwrapSubclasses

    asked_for = [kind.value for kind in Activations if kind is not Activations.INT8_FIXED]
    if activations is not None and activations not in asked_for:
        accepted = f"{', '.join(asked_for[:-1])} or {asked_for[-1]}"
        raise UsageError("unknown kind of activations", found=repr(activations), accepted=accepted)
    if isinstance(model, torch.nn.Module):
        if example is None:
            raise UsageError(
                "a module needs example inputs", advice="pass example=(tensor, ...) or an ExportedProgram"
            )
        model = export_module(model, example, dynamic_shapes)
    asked = None if activations is None else Activations(activations)
    program = Program({entry: model})
    passes: list[Pass] = [
        UnwrapSubclasses(),
        FindDequantizedLinears(asked, min_tokens=min_tokens),
        MergeLinears(),
        FindAttention(),
        FindNorms(),
    ]
    run_passes(program, passes, hooks)
    return program
