"""Whether a model's caches hold latents (``--latent-cache``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfbyte.errors import UsageError

if TYPE_CHECKING:
    from halfbyte.checkpoints import Checkpoint

CHOICES = ("auto", "on", "off")
# Four queries of so many columns fit the shared memory that every Vulkan device has, and several a CPU's stack.
MOST_COLUMNS = 896


def keeps_latents(checkpoint: Checkpoint, choice: str) -> bool:
    """Whether caches of latents are asked for, or the model has latent attention and nothing else is.

    Latents that are wider than the kernels take are left alone by ``auto``, with a warning.

    Raises:
        UsageError: no such choice, or ``on`` for a model without latent attention, or whose latents are too wide.
    """
    from halfbyte.checkpoints.latent_layers import has_latents, latent_columns
    from halfbyte.checkpoints.model_config import LATENT

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
    if not found or choice == "off":
        return False
    columns = latent_columns(checkpoint)
    if columns <= MOST_COLUMNS:
        return True
    if choice == "on":
        raise UsageError(
            "the latents of this model are too wide for a cache of them",
            where="--latent-cache on",
            found=f"{columns} columns, the rotated ones included",
            accepted=f"at most {MOST_COLUMNS}",
            advice="leave --latent-cache at auto, or off: keys and values of every head",
        )
    checkpoint.warnings.append(
        f"caches hold keys and values of every head: latents of {columns} columns are wider than {MOST_COLUMNS}"
    )
    return False
