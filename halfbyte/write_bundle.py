"""Writes what a compilation made: programs, archive, tokenizer, manifest and report in one folder."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfbyte.compile_phases import Watch
from halfbyte.model_facts import Facts

if TYPE_CHECKING:
    from halfbyte.lowering.importer import Imported
    from halfbyte.lowering.options import CompileOptions
    from halfbyte.lowering.parameters import Parameters
    from halfbyte.lowering.targets.target import Target
    from halfbyte.passes.program import Program
    from halfbyte.runtime.manifest import Manifest


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


def write_bundle(
    out: Path,
    targets: Sequence[Target],
    vmfbs: Sequence[bytes],
    parameters: Parameters,
    imported: Imported,
    program: Program,
    facts: Facts,
    options: CompileOptions,
    watch: Watch,
) -> Compiled:
    """Writes a bundle, whole or not at all.

    Args:
        out: its folder; replaced if it is a bundle.
        targets: in the order of ``vmfbs``, their compiled programs.
        parameters: of the archive that all of them share.
        imported: the program as it was imported, for its entry points.
        program: with the report.
    """
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
