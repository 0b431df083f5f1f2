"""The whole compilation, as a few named phases: load, rewrite, export, import, compile, write."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfbyte.layer_activations import LayerActivations
from halfbyte.lowering.options import CompileOptions

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

    from halfbyte.checkpoints import Checkpoint, LayerInfo
    from halfbyte.lowering.importer import Imported
    from halfbyte.lowering.kept_imports import KeptImport
    from halfbyte.lowering.parameters import Parameters
    from halfbyte.lowering.splice import Spliced
    from halfbyte.lowering.targets.target import Target
    from halfbyte.passes.program import Program
    from halfbyte.passes.scheme import Zero
    from halfbyte.passes.weight import Weight
    from halfbyte.runtime.manifest import Manifest, Model, Tensor

# Options that an import does not depend on.
_AFTER_THE_IMPORT = ("target", "cpu", "vulkan_target", "cuda_arch", "fat", "iree_flags", "dump_dir")
PHASES = ("load", "rewrite", "export", "import", "compile", "write")


class Progress:
    """Called as the compilation goes on; this one says nothing."""

    def phase(self, name: str) -> None:
        """A phase of `PHASES` begins."""

    def advance(self, done: int, total: int) -> None:
        """Bytes of the archive written so far, and in all."""


@dataclass
class Compiled:
    """What a compilation made.

    Attributes:
        path: the bundle.
        manifest: as written.
        report: as written to report.json.
        seconds: by phase.
        run_line: an iree-run-module command for the result.
    """

    path: Path
    manifest: Manifest
    report: dict[str, Any]
    seconds: dict[str, float] = field(default_factory=dict)
    run_line: str = ""


def compile_model(
    model: str | Path | ExportedProgram | Program,
    out: str | Path,
    options: CompileOptions | None = None,
    progress: Progress | None = None,
) -> Compiled:
    """Compiles a checkpoint, or a graph, to a bundle.

    Args:
        model: a Hugging Face folder, a .gguf file, a torch ExportedProgram, or the program `halfbyte.rewrite` gives.
        out: the bundle's folder; replaced if it is a bundle.
        options: see `CompileOptions`.
        progress: told of phases and of the bytes written.

    Raises:
        CheckpointError: the checkpoint is unreadable, malformed or unknown.
        UnsupportedLayerError: layers cannot be compiled as asked; all of them are named.
        CompilerError: iree-compile failed.
        UsageError: options that make no sense, or an output that is not a bundle.
    """
    from halfbyte.fusions import chosen_fusions
    from halfbyte.lowering.bundle import check_replaceable
    from halfbyte.lowering.importer import import_entries
    from halfbyte.lowering.splice import splice
    from halfbyte.lowering.targets.choice import chosen_targets

    options, watch, out = options or CompileOptions(), _Watch(progress or Progress()), Path(out)
    check_replaceable(out)
    targets, fusions = chosen_targets(options), chosen_fusions(options.fuse)
    if isinstance(model, str | Path):
        program, facts = _from_checkpoint(Path(model), options, fusions, watch)
    else:
        program, facts = _from_graph(model, options, watch)
    with watch("import"):
        imported = facts.imported or import_entries(program.entries)
        if facts.kept is not None and facts.imported is None:
            facts.kept.write(imported, program)
        spliced = [splice(imported, program, target) for target in targets]
    known = {row.name for row in program.report.layers}
    program.report.layers += [row for row in spliced[0].own if row.name not in known]
    for row in program.report.layers:
        row.kernel = spliced[0].kernels.get(row.name, "IREE's own code")
    with watch("compile"):
        modules = zip(targets, spliced, strict=True)
        several = len(targets) > 1
        vmfbs = [_compile(module, target, several, options, program) for target, module in modules]
        if options.fat:
            vmfbs = [_joined(targets, vmfbs, options)] * len(targets)
    with watch("write"):
        parameters = spliced[0].parameters
        return _write(out, targets, vmfbs, parameters, imported, program, facts, options, watch)


@dataclass
class _Facts:
    """What the manifest says of the model beyond its program, and the program's import if it is known already."""

    model: Model
    caches: tuple[Tensor, ...] = ()
    checkpoint: Checkpoint | None = None
    kept: KeptImport | None = None
    imported: Imported | None = None


class _Watch:
    def __init__(self, progress: Progress) -> None:
        self.progress, self.seconds = progress, dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.progress.phase(phase)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start


# ---------------------------------------------------------------- a checkpoint


def _from_checkpoint(
    path: Path, options: CompileOptions, fusions: frozenset[str], watch: _Watch
) -> tuple[Program, _Facts]:
    from halfbyte.checkpoints import build_model, open_checkpoint
    from halfbyte.checkpoints.quantized_head import with_head
    from halfbyte.fusions import passes_of
    from halfbyte.lowering.decoder import cache_shapes, export_decoder
    from halfbyte.passes.find_attention import DONE
    from halfbyte.passes.fuse_linears import FusedAsBefore
    from halfbyte.passes.merge_linears import MergeAsBefore, MergeLinears
    from halfbyte.passes.pipeline import run_passes
    from halfbyte.passes.program import Program
    from halfbyte.passes.report import Report, raise_refusals
    from halfbyte.runtime.manifest import Tensor

    with watch("load"):
        activations = LayerActivations.of(vars(options))
        checkpoint = with_head(open_checkpoint(path), options.lm_head)
        activations.check_patterns(checkpoint.layers.values())
        report = Report(warnings=list(checkpoint.warnings))
        for layer in checkpoint.layers.values():
            report.layers.append(_row(layer, activations, options))
            if layer.refusal is not None:
                report.refusals.append(layer.refusal)
            if (refused := activations.refused(layer)) is not None:
                report.refusals.append(refused)
        if "lm_head" not in checkpoint.layers and checkpoint.config.get("tie_word_embeddings"):
            report.layers.append(_tied_head(checkpoint))
        if options.on_unsupported == "error":
            raise_refusals(report.refusals)
    with watch("rewrite"):
        dtype = _dtype(options)
        model = build_model(
            checkpoint, dtype=dtype, activations=activations.choose, min_tokens=options.min_tokens
        )
        context = _context(model.config, options)
    with watch("export"):
        program = Program({}, empty=True, report=report)
        _sources(program, model, checkpoint)
        kept = _kept(model, context, checkpoint, options, fusions)
        known = None if kept is None else kept.read()
        if known is None:
            samples = options.sample == "program"
            program.entries = export_decoder(model, context, options.kv_cache, samples)
            run_passes(program, [MergeLinears(), *passes_of(fusions)])
        else:
            run_passes(program, [MergeAsBefore(known[1]), FusedAsBefore(known[2])])
        for number in range(model.config.num_hidden_layers):
            report.attention[f"model.layers.{number}.self_attn"] = f"{DONE}, caches in {options.kv_cache}"
    caches = tuple(Tensor(c.name, c.shape, options.kv_cache) for c in cache_shapes(model.config, context))
    facts = _model(checkpoint.config, model.config, context, options)
    return program, _Facts(facts, caches, checkpoint, kept, None if known is None else known[0])


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
    from halfbyte.passes.report import LayerRow
    from halfbyte.passes.weight import dtype_name

    embedding = checkpoint.floats["model.embed_tokens.weight"]
    shape, storage = (embedding.shape[0], embedding.shape[1]), f"float {dtype_name(embedding.dtype)}"
    return LayerRow(
        "lm_head", shape, storage, "float", "float", reason="shares the weight of model.embed_tokens"
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
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        key = first.setdefault(id(parameter), name)
        program.tensors[name] = TensorSource(key, filled(key))
    for name, buffer in model.named_buffers():
        if not buffer.is_meta:
            program.tensors[name] = TensorSource(name, computed(buffer))


def _context(config: Any, options: CompileOptions) -> int:
    from halfbyte.errors import UsageError

    most = int(getattr(config, "max_position_embeddings", 2048))
    chosen = options.max_context or min(most, 2048)
    if not 2 <= chosen <= most:
        raise UsageError(
            "the context does not fit the model",
            where="--max-context",
            found=str(chosen),
            accepted=f"2 to {most}",
        )
    return chosen


def _dtype(options: CompileOptions) -> torch.dtype:
    import torch

    return {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[options.dtype]


def _model(raw: dict[str, Any], config: Any, context: int, options: CompileOptions) -> Model:
    from halfbyte.runtime.manifest import Model

    def ids(name: str) -> tuple[int, ...]:
        value = raw.get(name)
        return () if value is None else tuple(value) if isinstance(value, list) else (value,)

    kind, size = str(config.model_type), int(config.vocab_size)
    return Model(kind, options.dtype, size, context, ids("bos_token_id"), ids("eos_token_id"))


# ---------------------------------------------------------------- a graph


def _from_graph(
    model: ExportedProgram | Program, options: CompileOptions, watch: _Watch
) -> tuple[Program, _Facts]:
    from halfbyte.errors import UsageError
    from halfbyte.passes.program import Program
    from halfbyte.passes.report import raise_refusals
    from halfbyte.rewrite_model import rewrite
    from halfbyte.runtime.manifest import Model

    if options.layers:
        raise UsageError(
            "layers of a graph cannot be chosen by name",
            where="layers",
            found=", ".join(options.layers)[:200],
            accepted="layers of a checkpoint",
        )
    with watch("rewrite"):
        if isinstance(model, Program):
            program = model
        else:
            activations = "none" if options.activations == "auto" else options.activations
            program = rewrite(model, activations=activations, min_tokens=options.min_tokens)
        if options.on_unsupported == "error":
            raise_refusals(program.report.refusals)
    return program, _Facts(Model("graph", options.dtype))


# ---------------------------------------------------------------- compile and write


def _compile(
    spliced: Spliced, target: Target, several: bool, options: CompileOptions, program: Program
) -> bytes:
    from halfbyte.lowering.bundle import write_json
    from halfbyte.lowering.compiler import compile_module
    from halfbyte.lowering.joined_targets import END_FLAG

    importing = ["--iree-input-type=torch", *target.input_flags]
    flags = [*importing, *target.flags, *options.iree_flags, *[END_FLAG] * options.fat]
    dump_dir = options.dump_dir
    if dump_dir is not None and several:
        dump_dir = dump_dir / f"{target.name}-{target.label}"
    if options.dump_dir is not None:
        for name, entry in program.entries.items():
            options.dump_dir.mkdir(parents=True, exist_ok=True)
            (options.dump_dir / f"{name}.graph.txt").write_text(entry.graph_module.print_readable(False))
        write_json(options.dump_dir / "report.json", program.report.to_json())
    vmfb, _ = compile_module(
        spliced.text,
        flags,
        dump_dir=dump_dir,
        cache=options.cache,
        host=target.host,
    )
    return vmfb


def _joined(targets: Sequence[Target], modules: Sequence[bytes], options: CompileOptions) -> bytes:
    from halfbyte.lowering.compiler import compile_module
    from halfbyte.lowering.joined_targets import START_FLAG, Part, join

    parts = [Part(t.name, t.device_id, module.decode()) for t, module in zip(targets, modules, strict=True)]
    flags = [START_FLAG, *options.iree_flags]
    vmfb, _ = compile_module(join(parts), flags, dump_dir=options.dump_dir, cache=options.cache)
    return vmfb


def _write(
    out: Path,
    targets: Sequence[Target],
    vmfbs: Sequence[bytes],
    parameters: Parameters,
    imported: Imported,
    program: Program,
    facts: _Facts,
    options: CompileOptions,
    watch: _Watch,
) -> Compiled:
    from halfbyte.kept_tokenizer import save_tokenizer
    from halfbyte.lowering.archive import write_archive
    from halfbyte.lowering.bundle import bundle_folder, run_line, write_flag_files, write_json
    from halfbyte.lowering.entry_points import entry_points
    from halfbyte.lowering.splice import SCOPE
    from halfbyte.runtime import manifest as contract

    layout = targets[0].layout
    with bundle_folder(out) as folder:
        programs = []
        for target, vmfb in zip(targets, vmfbs, strict=True):
            alone = sum(other.name == target.name for other in targets) == 1
            kind = f"{target.name}{'' if alone else f'-{target.label}'}"
            file = "model.vmfb" if options.fat else f"model.{kind}.vmfb"
            (folder / file).write_bytes(vmfb)
            digest = hashlib.sha256(vmfb).hexdigest()
            programs.append(contract.Program(target.name, file, digest, target.drivers, **target.runs_on))
        archive_file = f"model.{layout}.irpa"
        digest = write_archive(folder / archive_file, parameters, watch.progress.advance)
        size = (folder / archive_file).stat().st_size
        tensors = {t.key: contract.ParameterTensor(t.bytes) for t in parameters.tensors}
        served = tuple(dict.fromkeys(target.name for target in targets))
        archive = contract.ParameterArchive(SCOPE, archive_file, digest, layout, size, served, tensors)
        checkpoint = facts.checkpoint
        tokenizer = [] if checkpoint is None else save_tokenizer(checkpoint, folder, options.cache)
        layers = [
            contract.Layer(row.name, row.shape, row.scheme, row.activations, row.kernel)
            for row in program.report.layers
        ]
        manifest = contract.Manifest(
            facts.model,
            tuple(programs),
            (archive,),
            entry_points(imported, facts.caches),
            facts.caches,
            tuple(layers),
            tuple(tokenizer),
            versions(),
        )
        write_json(folder / contract.FILE_NAME, manifest.to_json())
        write_flag_files(folder, manifest)
        report = {**program.report.to_json(), "options": _options(options), "seconds": watch.seconds}
        write_json(folder / "report.json", report)
    return Compiled(out, manifest, report, watch.seconds, run_line(manifest, out))


def _options(options: CompileOptions) -> dict[str, Any]:
    kept = {key: value for key, value in vars(options).items() if key not in ("dump_dir", "cache")}
    return {**kept, "iree_flags": list(options.iree_flags)}


def versions() -> dict[str, str]:
    """Versions of what shapes a bundle, by distribution name."""
    out = {}
    for name in ("halfbyte", "iree-base-compiler", "torch", "torch-mlir", "transformers"):
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            continue
    return out
