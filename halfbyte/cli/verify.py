"""halfbyte verify: does a bundle compute what its checkpoint says?"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Annotated

import typer

from halfbyte.cli.bundle_options import BundleFolder, DeviceOption, ThreadsOption
from halfbyte.cli.shown_progress import ShownProgress
from halfbyte.errors import ComparisonError


def verify_command(
    out: BundleFolder,
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The checkpoint it was compiled from.")],
    tokens: Annotated[
        str | None, typer.Option(help="Token numbers to use: 176,5,271, or @file. A sentence, if left out.")
    ] = None,
    max_layer_error: Annotated[
        float | None,
        typer.Option(
            help="Largest error of a layer against its reference. Default 0: bit for bit; e4m3 weights 1e-5; GPUs 1e-6."
        ),
    ] = None,
    max_logits_error: Annotated[
        float | None, typer.Option(help="Largest error of the logits against the float model, relative.")
    ] = None,
    max_kl: Annotated[
        float | None, typer.Option(help="Largest mean KL divergence from the float model.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
) -> None:
    """Compares every quantized layer with its reference, on the inputs it has in the float model, and the logits.

    Exits with 1 when something is over its limit.
    """
    warnings.filterwarnings("ignore", module=r"torch|transformers|copyreg")
    from halfbyte.cli.logits import parse_tokens
    from halfbyte.verify_model import Limits, verify

    numbers = None if tokens is None else parse_tokens(tokens)
    limits = Limits(max_layer_error, max_logits_error, max_kl)
    with ShownProgress() as progress:
        found = verify(
            out, model, tokens=numbers, limits=limits, device=device, threads=threads, progress=progress
        )
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=1))
    else:
        equal = sum(check.equal for check in found.layers)
        near = [
            check for check in found.layers if check.limit and not check.equal and check.error <= check.limit
        ]
        promised = sorted({check.limit for check in near})
        within = (
            f", {len(near)} more within {' or '.join(f'{limit:.0e}' for limit in promised)}" if near else ""
        )
        typer.echo(
            f"layers: {equal} of {len(found.layers)} equal the reference bit for bit{within} "
            f"({found.tokens} tokens each)"
        )
        worst = sorted(found.layers, key=lambda check: -check.float_error)[:5]
        for check in worst:
            typer.echo(f"  {check.name}: reference {check.error:.2e}, float layer {check.float_error:.2e}")
        typer.echo(
            f"logits against the float model: error {found.logits_error:.2e}, KL {found.kl:.2e}, "
            f"same token {100 * found.agreement:.1f} %"
        )
        if found.head_kl is not None:
            typer.echo(f"rounding the head costs: KL {found.head_kl:.2e}")
        typer.echo(f"prefill and decode against forward: {found.step_error:.2e}")
    if found.failures:
        shown = "\n  ".join(found.failures[:20])
        raise ComparisonError(f"{len(found.failures)} comparisons failed:\n  {shown}", where=str(out))
