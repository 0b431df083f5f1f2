"""halfbyte inspect: what a checkpoint holds and what compile would do with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

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


def inspect_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A Hugging Face folder or a .gguf file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one entry per layer.")] = False,
    activations: ActivationsOption = "auto",
    layer: LayerOption = None,
    on_unsupported: OnUnsupportedOption = "error",
    latent_cache: LatentCacheOption = "auto",
) -> None:
    """Says what a checkpoint holds and what compile would do with each layer. Reads headers only."""
    from halfbyte.inspect_model import inspect

    choice("--activations", activations, ACTIVATIONS)
    choice("--on-unsupported", on_unsupported, ("error", "float"))
    choice("--latent-cache", latent_cache, LATENT_CACHES)
    found = inspect(
        model,
        activations=activations,
        layers=tuple(layer or ()),
        on_unsupported=on_unsupported,
        latent_cache=latent_cache,
    )
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=1))
        return
    typer.echo(f"{found.path}: {found.format}, {found.architecture}")
    typer.echo("  " + ", ".join(f"{key} {value}" for key, value in found.config.items()))
    typer.echo(f"  {found.parameters}")
    rows = [("layers", "shape", "storage", "scheme", "compile would")]
    for group in found.groups:
        name = f"{group.pattern} x{group.count}" if group.count > 1 else group.pattern
        example = group.example
        shape = "x".join(map(str, example.shape))
        rows.append((name, shape, example.storage, example.scheme, example.plan))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for warning in found.warnings:
        typer.echo(f"warning: {warning}", err=True)
