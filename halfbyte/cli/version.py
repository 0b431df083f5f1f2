"""halfbyte version: what is installed."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from typing import Annotated

import typer

_PACKAGES = (
    "halfbyte",
    "iree-base-runtime",
    "iree-base-compiler",
    "torch",
    "torch-mlir",
    "transformers",
    "tokenizers",
    "numpy",
)


def version_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prints the versions of halfbyte and of what it stands on."""
    found = versions()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    width = max(map(len, found))
    for package, version in found.items():
        typer.echo(f"{package:{width}}  {version or 'not installed'}")


def versions() -> dict[str, str | None]:
    """Returns package to version, None where it is not installed; imports none of them."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found
