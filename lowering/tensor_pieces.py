"""Tensors that no kernel has a layout for, as the archive takes them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from halfbyte.errors import CompilerError
from halfbyte.lowering.parameters import TensorSpec


def pieces(value: torch.Tensor, spec: TensorSpec, most: int = 2**26) -> np.ndarray | Iterator[np.ndarray]:
    """A tensor's bytes, in the dtype the program declares; a large one's in pieces, which are converted one by one.

    Args:
        most: bytes of a piece, about.

    Raises:
        CompilerError: the tensor has another shape than declared.
    """
    kinds = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f64": torch.float64}
    if tuple(value.shape) != spec.shape:
        raise CompilerError(
            "a tensor has another shape than its model declares",
            where=spec.key,
            found=str(list(value.shape)),
            accepted=str(list(spec.shape)),
        )

    def octets(part: torch.Tensor) -> np.ndarray:
        part = part.detach().to(kinds.get(spec.dtype, part.dtype)).contiguous()
        return part.reshape(-1).view(torch.uint8).numpy() if part.numel() else np.zeros(0, np.uint8)

    if spec.bytes <= most or value.dim() == 0:
        return octets(value)
    return map(octets, value.split(max(1, most * len(value) // spec.bytes)))
