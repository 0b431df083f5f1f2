"""halfbyte compile: from a checkpoint to a bundle."""

from __future__ import annotations

import re
import warnings
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfbyte.cli.compile_options import (
    ACTIVATIONS,
    LATENT_CACHES,
    ActivationsOption,
    LatentCacheOption,
    LayerOption,
    OnUnsupportedOption,
    choice,
)
from halfbyte.cli.shown_progress import ShownProgress

if TYPE_CHECKING:
    from halfbyte.write_bundle import Compiled


def compile_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A Hugging Face folder or a .gguf file.")],
    out: Annotated[
        Path, typer.Option("-o", "--output", metavar="OUT", help="The bundle to write: a folder.")
    ],
    target: Annotated[
        str,
        typer.Option(
            "--target",
            metavar="NAME[,NAME...]",
            help="What to compile for: cpu, vulkan, cuda. With several, a program for each over the same parameters.",
        ),
    ] = "cpu",
    activations: ActivationsOption = "auto",
    layer: LayerOption = None,
    min_tokens: Annotated[
        int,
        typer.Option(
            "--min-tokens",
            min=0,
            metavar="N",
            help="With int8 activations, calls with fewer tokens keep float activations. A token's result then "
            "depends on how many come with it. 0: never.",
        ),
    ] = 0,
    max_context: Annotated[
        int | None,
        typer.Option(
            "--max-context",
            metavar="N",
            help="Positions of the caches; the model's own limit, at most 2048, if left out.",
        ),
    ] = None,
    cpu: Annotated[
        str,
        typer.Option(
            "--cpu",
            metavar="NAME[,NAME...]",
            help="host (this machine), x86-64, x86-64-v2, x86-64-v3, avxvnni, x86-64-v4, avx512vnni, avx512bf16, "
            "amx, aarch64, aarch64-dotprod or aarch64-i8mm. With several, the bundle runs on all of them and the best "
            "that fits is loaded.",
        ),
    ] = "host",
    vulkan_target: Annotated[
        str,
        typer.Option(
            "--vulkan-target",
            metavar="NAME",
            help="portable (any device of Vulkan 1.3 with integer dot products), portable-nodot (without them), a name "
            "of iree-compile's --iree-vulkan-target, or a file with IREE's description of a device.",
        ),
    ] = "portable",
    cuda_arch: Annotated[
        str,
        typer.Option(
            "--cuda-arch",
            metavar="NAME[,NAME...]",
            help="sm_80, sm_86, sm_89, sm_90, sm_120 or sm_121: a program for each. Newer GPUs run older ones'.",
        ),
    ] = "sm_80",
    fat: Annotated[
        bool, typer.Option("--fat", help="One .vmfb for all targets, which any of the devices loads.")
    ] = False,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="f32|f16|bf16", help="Type of activations.")
    ] = "f32",
    kv_cache: Annotated[
        str,
        typer.Option(
            "--kv-cache",
            metavar="f32|f16|bf16",
            help="Type of the key and value caches. f32 adds no error of its own whatever the type of activations; "
            "16 bits take half the memory, and half the time where long contexts wait for it.",
        ),
    ] = "f32",
    latent_cache: LatentCacheOption = "auto",
    lm_head: Annotated[
        str,
        typer.Option(
            "--lm-head",
            metavar="auto|keep|int8|int4",
            help="A head in float: auto rounds a large one to int8 if that is measured to cost next to nothing; "
            "keep it, or round it in groups. `halfbyte verify` says what that costs.",
        ),
    ] = "auto",
    fuse: Annotated[
        str,
        typer.Option(
            "--fuse",
            metavar="all|none|NAME[,NAME...]",
            help="What is computed together with the linears beside it: norm, glu, residual, rotate.",
        ),
    ] = "all",
    sample: Annotated[
        str,
        typer.Option(
            "--sample",
            metavar="host|program",
            help="Where the next token is drawn. With program, logits need not leave the device.",
        ),
    ] = "host",
    on_unsupported: OnUnsupportedOption = "error",
    dump_dir: Annotated[
        Path | None,
        typer.Option("--dump-dir", metavar="DIR", help="Keep graphs, MLIR and the compiler's command here."),
    ] = None,
    iree_flag: Annotated[
        list[str] | None,
        typer.Option("--iree-flag", metavar="FLAG", help="One more flag for iree-compile; repeatable."),
    ] = None,
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Use the cache of imports and compiled programs.")
    ] = True,
) -> None:
    """Compiles a checkpoint to a bundle: programs, parameters and a manifest in one folder."""
    # torch and transformers warn about their own internals while a model is exported.
    warnings.filterwarnings("ignore", module=r"torch|transformers|copyreg|contextlib")
    from halfbyte.compile_model import compile_model
    from halfbyte.lowering.options import CompileOptions

    options = CompileOptions(
        target=target,
        activations=choice("--activations", activations, ACTIVATIONS),  # type: ignore[arg-type]
        layers=tuple(layer or ()),
        min_tokens=min_tokens,
        max_context=max_context,
        cpu=cpu,
        vulkan_target=vulkan_target,
        cuda_arch=cuda_arch,
        fat=fat,
        lm_head=choice("--lm-head", lm_head, ("auto", "keep", "int8", "int4")),  # type: ignore[arg-type]
        on_unsupported=choice("--on-unsupported", on_unsupported, ("error", "float")),  # type: ignore[arg-type]
        dtype=choice("--dtype", dtype, ("f32", "f16", "bf16")),  # type: ignore[arg-type]
        kv_cache=choice("--kv-cache", kv_cache, ("f32", "f16", "bf16")),  # type: ignore[arg-type]
        latent_cache=choice("--latent-cache", latent_cache, LATENT_CACHES),  # type: ignore[arg-type]
        fuse=fuse,
        sample=choice("--sample", sample, ("host", "program")),  # type: ignore[arg-type]
        dump_dir=dump_dir,
        iree_flags=tuple(iree_flag or ()),
        cache=cache,
    )
    with ShownProgress() as progress:
        compiled = compile_model(model, out, options, progress)
    for line in summary(compiled):
        typer.echo(line)


def summary(compiled: Compiled) -> list[str]:
    """The lines after a compilation: layers by scheme and kernel, what was left alone and why, sizes, how to run."""
    layers = compiled.report["layers"]
    lines = []
    done = Counter((row["mode"], row["scheme"], row["kernel"]) for row in layers if row["scheme"] != "float")
    for (mode, scheme, kernel), count in done.items():
        lines.append(f"{_layers(count)}  {mode}  {scheme}  {kernel}")
    left = Counter((row["storage"], row["reason"]) for row in layers if row["scheme"] == "float")
    for (storage, reason), count in left.items():
        names = [row["name"] for row in layers if (row["storage"], row["reason"]) == (storage, reason)]
        patterns = _patterns(names)
        shown = ", ".join([*patterns[:4], *["..."] * (len(patterns) > 4)])
        lines.append(f"{_layers(count)}  float  {storage}: {reason or 'float in the checkpoint'} ({shown})")
    lines += [f"warning: {warning}" for warning in compiled.report["warnings"]]
    archive, served = compiled.manifest.parameters[0], defaultdict[str, list[str]](list)
    for program in compiled.manifest.programs:
        target = "this machine's CPU" if program.cpu == "host" else program.cpu or program.target
        served[program.file].append(target)
    files = [
        f"{file} {_size((compiled.path / file).stat().st_size)} for {', '.join(targets)}"
        for file, targets in served.items()
    ]
    lines.append(f"{compiled.path}: {', '.join([*files, f'{archive.file} {_size(archive.bytes)}'])}")
    lines.append(
        "time: " + ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in compiled.seconds.items())
    )
    lines.append(f"run:  {compiled.run_line}")
    return lines


def _layers(count: int) -> str:
    return f"{count:4d} layer{'s' if count != 1 else ' '}"


def _patterns(names: list[str]) -> list[str]:
    """``model.layers.*.mlp.up_proj x30`` for names that differ in their numbers alone."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), []).append(name)
    return [f"{pattern} x{len(same)}" if len(same) > 1 else same[0] for pattern, same in found.items()]


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
