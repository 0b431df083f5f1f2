"""The options of all commands that run a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

BundleFolder = Annotated[
    Path, typer.Argument(metavar="OUT", help="The bundle: a folder written by `halfbyte compile`.")
]
DeviceOption = Annotated[
    str, typer.Option("--device", help="cpu, local-sync, vulkan, cuda, or as `halfbyte devices` lists them.")
]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", help="Worker threads of the CPU; one per core if left out.")
]
ParametersOption = Annotated[
    str, typer.Option("--parameters", metavar="huge|mmap", help="Weights in memory on huge pages, or mapped.")
]
