"""Signed codes, a byte each, as the codes of a weight."""

from __future__ import annotations

import torch

from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.errors import CheckpointError


def unsigned_codes(key: str, bits: int, tensors: SafetensorsFolder) -> torch.Tensor:
    """int8 codes as uint8: what was -8 (-128 of 8 bits) becomes 0.

    Raises:
        CheckpointError: a value that has no place in so many bits.
    """
    middle = 1 << (bits - 1)
    shifted = tensors.read(key).view(torch.uint8) + middle
    bad = int((shifted > 2 * middle - 1).sum())
    if bad:
        raise CheckpointError(
            f"there are values that are no integers of {bits} bits",
            where=key,
            found=f"{bad} of {shifted.numel()}",
            accepted=f"{-middle} to {middle - 1}",
            advice="the number of bits in the configuration is wrong, or the file is damaged",
        )
    return shifted
