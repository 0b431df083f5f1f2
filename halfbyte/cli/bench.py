"""halfbyte bench: tokens per second."""

from __future__ import annotations

import csv
import io
import json
from typing import Annotated, Any

import typer

from halfbyte.cli.bundle_options import BundleFolder, DeviceOption, ParametersOption
from halfbyte.errors import UsageError

_FORMATS = ("md", "json", "csv")
_COLUMNS = ("model", "bytes", "device", "threads", "test", "tokens_per_second", "deviation", "repetitions")


def bench_command(
    out: BundleFolder,
    prompt: Annotated[
        str, typer.Option("-p", "--prompt", metavar="N,...", help="Lengths of prompts; 0 for none.")
    ] = "512",
    generate: Annotated[
        str, typer.Option("-n", "--generate", metavar="N,...", help="Numbers of new tokens; 0 for none.")
    ] = "64",
    depth: Annotated[
        str, typer.Option("-d", "--depth", metavar="N,...", help="Tokens held before, not timed.")
    ] = "0",
    repetitions: Annotated[
        int, typer.Option("-r", "--repetitions", help="Of each test, and one before.")
    ] = 5,
    chunk: Annotated[int, typer.Option(help="Tokens per call of prefill.")] = 512,
    threads: Annotated[
        str,
        typer.Option(
            "--threads", metavar="N,...", help="Worker threads of the CPU; one per core if left out."
        ),
    ] = "",
    form: Annotated[
        str, typer.Option("-o", "--output", metavar="md|json|csv", help="How rows are written.")
    ] = "md",
    device: DeviceOption = "cpu",
    parameters: ParametersOption = "huge",
) -> None:
    """Measures tokens per second: pp is a prompt at once, tg tokens one by one, as llama-bench has them."""
    from halfbyte.runtime import load
    from halfbyte.runtime.speed import Test, measure_speed

    if form not in _FORMATS:
        raise UsageError("unknown form of output", found=repr(form), accepted=", ".join(_FORMATS))
    tests = [
        test
        for held in _numbers(depth, "--depth")
        for test in (
            *(Test(prompt=count, depth=held) for count in _numbers(prompt, "--prompt") if count),
            *(Test(generated=count, depth=held) for count in _numbers(generate, "--generate") if count),
        )
    ]
    if not tests:
        raise UsageError("nothing to measure", found="--prompt 0 --generate 0", accepted="a number above 0")
    rows: list[dict[str, Any]] = []
    for count in _numbers(threads, "--threads") if threads else [None]:
        bundle = load(out, device=device, threads=count, parameters=parameters)
        for note in bundle.notes:
            typer.echo(f"note: {note}", err=True)
        typer.echo("; ".join(map(str, bundle.residences)), err=True)
        size = sum(archive.bytes for archive in bundle.manifest.parameters)
        for speed in measure_speed(bundle, tests, repetitions=repetitions, chunk=chunk, progress=_progress):
            rows.append(
                {
                    "model": bundle.manifest.model.architecture,
                    "bytes": size,
                    "device": bundle.device.driver,
                    "threads": count,
                    "test": str(speed.test),
                    "tokens_per_second": round(speed.mean, 2),
                    "deviation": round(speed.deviation, 2),
                    "repetitions": [round(rate, 2) for rate in speed.rates],
                }
            )
    typer.echo(_written(rows, form), nl=False)


def _progress(test: object, repetition: int) -> None:
    typer.echo(f"{test}: {f'repetition {repetition}' if repetition else 'warming up'}", err=True)


def _numbers(text: str, option: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [-1]
    if min(numbers) < (1 if option == "--threads" else 0):
        raise UsageError(
            f"{option} is no list of numbers", found=repr(text), accepted="such as 512 or 128,512"
        )
    return numbers


def _written(rows: list[dict[str, Any]], form: str) -> str:
    if form == "json":
        return json.dumps(rows, indent=1) + "\n"
    if form == "csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, _COLUMNS[:-1], extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()
    head = ("model", "size", "device", "threads", "test", "t/s")
    lines = [
        [
            row["model"],
            f"{row['bytes'] / 2**20:.1f} MiB",
            row["device"],
            str(row["threads"] or "all"),
            row["test"],
            f"{row['tokens_per_second']:.2f} ± {row['deviation']:.2f}",
        ]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    rule = ["-" * width for width in widths]
    return "".join(
        "| " + " | ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)) + " |\n"
        for line in (head, rule, *lines)
    )
