"""The whole compilation, as a few named phases: load, rewrite, export, import, compile, write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from halfbyte.checkpoint_program import program_of_checkpoint
from halfbyte.compile_phases import Watch
from halfbyte.lowering.options import CompileOptions
from halfbyte.model_facts import Facts
from halfbyte.progress import Progress
from halfbyte.write_bundle import Compiled, write_bundle

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from halfbyte.lowering.splice import Spliced
    from halfbyte.lowering.targets.target import Target
    from halfbyte.passes.program import Program


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

    options, watch, out = options or CompileOptions(), Watch(progress or Progress()), Path(out)
    check_replaceable(out)
    targets, fusions = chosen_targets(options), chosen_fusions(options.fuse)
    if isinstance(model, str | Path):
        program, facts = program_of_checkpoint(Path(model), options, fusions, watch)
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
        return write_bundle(out, targets, vmfbs, parameters, imported, program, facts, options, watch)


# ---------------------------------------------------------------- a graph


def _from_graph(
    model: ExportedProgram | Program, options: CompileOptions, watch: Watch
) -> tuple[Program, Facts]:
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
    return program, Facts(Model("graph", options.dtype))


# ---------------------------------------------------------------- compile


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
