"""halfbyte generate: text from a prompt."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from halfbyte.cli.bundle_options import BundleFolder, DeviceOption, ParametersOption, ThreadsOption


def generate_command(
    out: BundleFolder,
    prompt: Annotated[str, typer.Option("-p", "--prompt", help="The text to go on from.")],
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token each time.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from so many most likely tokens; 0 from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the most likely tokens up to this mass.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    stream: Annotated[bool, typer.Option(help="Print text as it comes.")] = True,
    chat: Annotated[bool, typer.Option(help="Put the prompt into the model's chat template.")] = False,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    parameters: ParametersOption = "huge",
) -> None:
    """Generates text. The text goes to stdout; what it took goes to stderr."""
    from halfbyte.runtime import Tokenizer, generate, load

    bundle = load(out, device=device, threads=threads, parameters=parameters)
    for note in bundle.notes:
        typer.echo(f"note: {note}", err=True)
    tokenizer = Tokenizer.of(bundle)
    tokens = tokenizer.chat([{"role": "user", "content": prompt}]) if chat else tokenizer.encode(prompt)
    generation = generate(
        bundle,
        tokens,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )
    text = tokenizer.stream(tokens)
    pieces: list[str] = []
    for token in generation:
        piece = text.push(token)
        if stream and piece:
            sys.stdout.write(piece)
            sys.stdout.flush()
        pieces.append(piece)
    pieces.append(text.flush())
    sys.stdout.write((pieces[-1] if stream else "".join(pieces)) + "\n")
    sys.stdout.flush()
    where = "; ".join(map(str, bundle.residences))
    typer.echo(f"{generation.timing}; ended by {generation.finish}; {where}", err=True)
