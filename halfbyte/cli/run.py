"""halfbyte run: calls an entry point with inputs from the command line, as iree-run-module does."""

from __future__ import annotations

from typing import Annotated

import typer

from halfbyte.cli.bundle_options import BundleFolder, DeviceOption, ParametersOption, ThreadsOption
from halfbyte.errors import UsageError


def run_command(
    out: BundleFolder,
    function: Annotated[
        str | None, typer.Option(help="The entry point; may be left out if there is only one.")
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input", help="2x3xf32=1,2,3,4,5,6 or 4xi64=7 or @file.npy or 2xbf16=@file.bin; repeat."
        ),
    ] = None,
    outputs: Annotated[
        list[str] | None, typer.Option("--output", help="-, @file.npy, @file.bin or nothing; one per output.")
    ] = None,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    parameters: ParametersOption = "huge",
) -> None:
    """Calls an entry point. Inputs and outputs are written as for iree-run-module."""
    from halfbyte.runtime import load
    from halfbyte.runtime.inputs import parse_input
    from halfbyte.runtime.outputs import write_output

    bundle = load(out, device=device, threads=threads, parameters=parameters)
    names = list(bundle.entry_points)
    if function is None and len(names) == 1:
        function = names[0]
    if function is None or function not in bundle.entry_points:
        raise UsageError("no such entry point", found=repr(function), accepted=", ".join(names))
    entry = bundle.entry_points[function]
    texts, targets = inputs or [], outputs or ["-"] * len(entry.outputs)
    for what, found, wanted in (("inputs", texts, entry.inputs), ("outputs", targets, entry.outputs)):
        if len(found) != len(wanted):
            raise UsageError(
                f"wrong number of {what}",
                where=function,
                found=str(len(found)),
                accepted=f"{len(wanted)}: {', '.join(map(str, wanted))}",
            )
    values = [parse_input(text, tensor.dtype) for text, tensor in zip(texts, entry.inputs, strict=True)]
    # The rest stays where the runtime can check it.
    arguments = [
        bundle.to_device(value, tensor.dtype) if tensor in bundle.manifest.caches else value
        for value, tensor in zip(values, entry.inputs, strict=True)
    ]
    results = bundle.call(function, *arguments)
    typer.echo(f"EXEC @{function}")
    for index, (result, tensor, target) in enumerate(zip(results, entry.outputs, targets, strict=True)):
        text = write_output(target, result, tensor.dtype)
        if text is not None:
            typer.echo(f"result[{index}]: hal.buffer_view\n{text}")
