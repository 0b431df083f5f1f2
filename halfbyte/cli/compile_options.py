"""The options of the commands that read a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from halfbyte.errors import UsageError
from halfbyte.latent_caches import CHOICES as LATENT_CACHES
from halfbyte.layer_activations import CHOICES as ACTIVATIONS

ActivationsOption = Annotated[
    str,
    typer.Option(
        "--activations",
        metavar="|".join(ACTIVATIONS),
        help="What quantized layers do to their input: as the checkpoint asks, int8 or e4m3 per token, or nothing.",
    ),
]
LayerOption = Annotated[
    list[str] | None,
    typer.Option(
        "--layer",
        metavar="PATTERN=KIND",
        help="Other activations for layers by name, e.g. '*.mlp.*=int8'; repeatable, the last that fits counts.",
    ),
]
LatentCacheOption = Annotated[
    str,
    typer.Option(
        "--latent-cache",
        metavar="|".join(LATENT_CACHES),
        help="Models with latent attention (DeepSeek): caches of latents, which take a few percent of the memory of "
        "every head's keys and values; kv_b_proj is in float then. auto: wherever the model has it.",
    ),
]
OnUnsupportedOption = Annotated[
    str,
    typer.Option(
        "--on-unsupported",
        metavar="error|float",
        help="Layers that cannot be computed as quantized: refuse the model, or use their dequantized weights.",
    ),
]


def choice(option: str, value: str, allowed: Sequence[str]) -> str:
    """The value, if it is one of those allowed; a UsageError that lists them if not."""
    if value not in allowed:
        raise UsageError("no such choice", where=option, found=repr(value), accepted=", ".join(allowed))
    return value
