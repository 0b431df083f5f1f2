"""From a checkpoint to a program: its layers chosen, its model traced, its graphs rewritten."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfbyte.choose_head import choose_head, reason
from halfbyte.compile_phases import Watch
from halfbyte.latent_caches import keeps_latents
from halfbyte.layer_activations import LayerActivations
from halfbyte.model_facts import Facts, chosen_context, model_facts, torch_dtype

if TYPE_CHECKING:
    import torch

    from halfbyte.checkpoints import Checkpoint, LayerInfo
    from halfbyte.lowering.kept_imports import KeptImport
    from halfbyte.lowering.options import CompileOptions
    from halfbyte.passes.program import Program
    from halfbyte.passes.report import Refusal
    from halfbyte.passes.scheme import Zero
    from halfbyte.passes.weight import Weight

# Options that an import does not depend on.
_AFTER_THE_IMPORT = ("target", "cpu", "vulkan_target", "cuda_arch", "fat", "iree_flags", "dump_dir")


def program_of_checkpoint(
    path: Path, options: CompileOptions, fusions: frozenset[str], watch: Watch
) -> tuple[Program, Facts]:
    """The program of a checkpoint, its graphs exported and rewritten (or none, where the cache holds their import).

    Raises:
        CheckpointError: the checkpoint is unreadable, malformed or unknown.
        UnsupportedLayerError: layers cannot be compiled as asked; all of them are named.
        UsageError: options that do not fit the model.
    """
    from halfbyte.checkpoints import build_model, open_checkpoint
    from halfbyte.checkpoints.architecture import HEAD
    from halfbyte.checkpoints.latent_layers import with_latents
    from halfbyte.fusions import passes_of
    from halfbyte.lowering.decoder import cache_shapes, export_decoder
    from halfbyte.passes.find_attention import DONE
    from halfbyte.passes.find_norms import NormsAsBefore
    from halfbyte.passes.fuse_linears import FusedAsBefore
    from halfbyte.passes.merge_linears import MergeAsBefore, MergeLinears
    from halfbyte.passes.pipeline import run_passes
    from halfbyte.passes.program import Program
    from halfbyte.passes.report import Report, raise_refusals
    from halfbyte.runtime.manifest import Tensor

    activations = LayerActivations.of(vars(options))
    with watch("load"):
        checkpoint = open_checkpoint(path)
        latents = keeps_latents(checkpoint, options.latent_cache)
        if latents:
            checkpoint = with_latents(checkpoint)
        if options.on_unsupported == "error":  # before anything is measured
            raise_refusals(_refusals(checkpoint, activations))
    checkpoint, head = choose_head(checkpoint, options, activations, watch)
    with watch("load"):
        activations.check_patterns(checkpoint.layers.values())
        report = Report(warnings=list(checkpoint.warnings), head=head)
        report.refusals += _refusals(checkpoint, activations)
        report.layers += [_row(layer, activations, options) for layer in checkpoint.layers.values()]
        head_name = checkpoint.name_of(HEAD)
        if head_name not in checkpoint.layers and checkpoint.config.get("tie_word_embeddings"):
            report.layers.append(_tied_head(checkpoint))
        for row in report.layers:
            if row.name == head_name:
                row.reason = reason(head) or row.reason
        if options.on_unsupported == "error":
            raise_refusals(report.refusals)
    with watch("rewrite"):
        dtype = torch_dtype(options)
        model = build_model(
            checkpoint,
            dtype=dtype,
            activations=activations.choose,
            min_tokens=options.min_tokens,
            latents=latents,
        )
        context = chosen_context(model.config, options)
    with watch("export"):
        program = Program({}, empty=True, report=report)
        _sources(program, model, checkpoint)
        kept = _kept(model, context, checkpoint, options, fusions)
        known = None if kept is None else kept.read()
        if known is None:
            samples = options.sample == "program"
            shown = options.dump_dir is not None
            program.entries = export_decoder(model, context, options.kv_cache, samples, shown)
            run_passes(program, [MergeLinears(), *passes_of(fusions)])
        else:
            run_passes(program, [MergeAsBefore(known[1]), FusedAsBefore(known[2]), NormsAsBefore(known[3])])
        for number in range(model.config.num_hidden_layers):
            held = f"caches {'of latents ' if latents else ''}in {options.kv_cache}"
            report.attention[f"model.layers.{number}.self_attn"] = f"{DONE}, {held}"
    caches = tuple(Tensor(c.name, c.shape, options.kv_cache) for c in cache_shapes(model, context))
    facts = model_facts(checkpoint.config, model.config, context, options)
    return program, Facts(facts, caches, checkpoint, kept, None if known is None else known[0])


def _kept(
    model: Any, context: int, checkpoint: Checkpoint, options: CompileOptions, fusions: frozenset[str]
) -> KeptImport | None:
    """Where the model's import is kept, if it may come from the cache: there are no graphs to dump then."""
    from halfbyte.lowering.kept_imports import KeptImport

    if not options.cache or options.dump_dir is not None:
        return None
    chosen = {key: value for key, value in vars(options).items() if key not in _AFTER_THE_IMPORT}
    layers = {f"layer {name}": info for name, info in checkpoint.layers.items()}
    return KeptImport.of(model, {**chosen, **layers, "context": context, "fuse": sorted(fusions)})


def _refusals(checkpoint: Checkpoint, activations: LayerActivations) -> list[Refusal]:
    """Layers that cannot be read as asked, and those that cannot have the activations asked for."""
    found = [
        refusal
        for layer in checkpoint.layers.values()
        for refusal in (layer.refusal, activations.refused(layer))
    ]
    return [refusal for refusal in found if refusal is not None]


def _row(layer: LayerInfo, choice: LayerActivations, options: CompileOptions) -> Any:
    from halfbyte.passes.report import LayerRow
    from halfbyte.passes.scheme import Fp8Scheme, mode_name

    if layer.scheme is None:
        reason = layer.reason
        if layer.refusal is not None:
            reason = f"dequantized: {layer.refusal.found} cannot be computed as quantized"
        return LayerRow(layer.name, layer.shape, layer.storage, "float", "float", reason=reason)
    activations = choice.choose(layer)
    reason = layer.reason
    if options.min_tokens and isinstance(layer.scheme, Fp8Scheme):
        reason = "--min-tokens does not apply to e4m3 weights"
    return LayerRow(
        layer.name,
        layer.shape,
        layer.storage,
        str(layer.scheme),
        activations.value,
        mode_name(layer.scheme, activations),
        reason=reason,
    )


def _tied_head(checkpoint: Checkpoint) -> Any:
    from halfbyte.checkpoints.architecture import EMBEDDING, HEAD
    from halfbyte.passes.report import LayerRow
    from halfbyte.passes.weight import dtype_name

    embedding = checkpoint.floats[checkpoint.name_of(f"{EMBEDDING}.weight")]
    shape, storage = (embedding.shape[0], embedding.shape[1]), f"float {dtype_name(embedding.dtype)}"
    return LayerRow(
        checkpoint.name_of(HEAD), shape, storage, "float", "float", reason=f"shares the weight of {EMBEDDING}"
    )


def _sources(program: Program, model: Any, checkpoint: Checkpoint) -> None:
    """Says where every tensor of the graphs is read from when the archive is written."""
    from halfbyte.checkpoints.expert_layers import experts_source
    from halfbyte.checkpoints.model import float_parameter
    from halfbyte.passes.fp8_experts import Fp8Experts
    from halfbyte.passes.fp8_linear import Fp8BlockLinear
    from halfbyte.passes.program import LayerSource, TensorSource
    from halfbyte.passes.quant_experts import QuantExperts
    from halfbyte.passes.quant_linear import QuantLinear
    from halfbyte.passes.tables import IntegerTable

    def weight(layer: str) -> Callable[[], Weight]:
        return lambda: checkpoint.quantized(checkpoint.name_of(layer))

    def stored(tensor: str) -> Callable[[], torch.Tensor]:
        return lambda: checkpoint.float_tensor(checkpoint.name_of(tensor))

    def filled(tensor: str) -> Callable[[], torch.Tensor]:
        return lambda: float_parameter(checkpoint, model, tensor)

    def computed(buffer: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: buffer

    for name, module in model.named_modules():
        if isinstance(module, QuantLinear | Fp8BlockLinear):
            bias = None if module.bias is None else stored(f"{name}.bias")
            program.layers[name] = LayerSource(weight(name), bias, (checkpoint.name_of(name),))
        elif isinstance(module, QuantExperts | Fp8Experts):
            zeros: tuple[Zero, ...] = ()
            if isinstance(module, QuantExperts):
                zeros = (module.scheme.up.zero, module.scheme.down.zero)
            program.experts[name] = experts_source(checkpoint, module.linears, *zeros)
            program.report.experts[name] = list(module.linears)
        elif isinstance(module, IntegerTable):
            for part, value in _table_parts(checkpoint, name).items():
                program.tensors[f"{name}.{part}"] = TensorSource(f"{name}.{part}", value)
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        key = first.setdefault(id(parameter), name)
        program.tensors.setdefault(name, TensorSource(key, filled(key)))
    for name, buffer in model.named_buffers():
        if not buffer.is_meta:
            program.tensors[name] = TensorSource(name, computed(buffer))


def _table_parts(checkpoint: Checkpoint, name: str) -> dict[str, Callable[[], torch.Tensor]]:
    """What an `IntegerTable` holds, read when it is needed."""
    from halfbyte.passes.weight import QuantTensor

    def weight() -> QuantTensor:
        found = checkpoint.quantized(checkpoint.name_of(name))
        assert isinstance(found, QuantTensor)
        return found

    return {"integers": lambda: weight().integers(), "scale": lambda: weight().scale}
