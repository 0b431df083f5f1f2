"""Whether a model's caches hold latents (``--latent-cache``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfbyte.errors import UsageError

if TYPE_CHECKING:
    from halfbyte.checkpoints import Checkpoint

CHOICES = ("auto", "on", "off")


def keeps_latents(checkpoint: Checkpoint, choice: str) -> bool:
    """Whether caches of latents are asked for, or the model has latent attention and nothing else is.

    Raises:
        UsageError: no such choice, or ``on`` for a model without latent attention.
    """
    from halfbyte.checkpoints.architecture import LATENT
    from halfbyte.checkpoints.latent_layers import has_latents

    if choice not in CHOICES:
        raise UsageError(
            "no such choice", where="--latent-cache", found=repr(choice), accepted=", ".join(CHOICES)
        )
    found = has_latents(checkpoint)
    if choice == "on" and not found:
        raise UsageError(
            "this model has no latent attention",
            where="--latent-cache on",
            found=str(checkpoint.config["model_type"]),
            accepted=", ".join(LATENT),
            advice="leave --latent-cache at auto",
        )
    return found and choice != "off"
