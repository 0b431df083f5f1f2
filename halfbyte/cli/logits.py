"""halfbyte logits: the logits of every position of a text, for evaluation by other tools."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from halfbyte.cli.bundle_options import BundleFolder, DeviceOption, ParametersOption, ThreadsOption
from halfbyte.errors import UsageError


def logits_command(
    out: BundleFolder,
    tokens: Annotated[str, typer.Option(help="Token numbers: 176,5,271, or @file that holds them.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The .npy file to write.")],
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    parameters: ParametersOption = "huge",
) -> None:
    """Writes float32 logits (tokens x vocabulary) to a .npy file: row t is what follows token t."""
    import numpy as np

    from halfbyte.runtime import load
    from halfbyte.runtime.logits import all_logits

    numbers = parse_tokens(tokens)
    if output.suffix != ".npy" or not output.resolve().parent.is_dir():
        raise UsageError(
            "cannot write", where=str(output), accepted="a name ending in .npy, in a folder that exists"
        )
    bundle = load(out, device=device, threads=threads, parameters=parameters)
    result = all_logits(bundle, numbers)
    try:
        np.save(output, result)
    except OSError as error:
        raise UsageError("cannot write", where=str(output), found=str(error)) from None
    typer.echo(f"{output}: float32 {list(result.shape)}", err=True)


def parse_tokens(text: str) -> list[int]:
    """Returns token numbers from ``1,2,3`` or, with @, from a file of numbers in any usual separation.

    Raises:
        UsageError: anything else is there.
    """
    where = "--tokens"
    if text.startswith("@"):
        where = text[1:]
        try:
            text = Path(where).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError("unreadable file", where=where, found=str(error)) from None
    words = [word for word in re.split(r"[\s,\[\]]+", text) if word]
    wrong = [word for word in words if not re.fullmatch(r"\d+", word)]
    if wrong or not words:
        raise UsageError(
            "no token numbers",
            where=where,
            found=repr(wrong[0]) if wrong else "nothing",
            accepted="numbers such as 176,5,271, or @file",
        )
    return [int(word) for word in words]
