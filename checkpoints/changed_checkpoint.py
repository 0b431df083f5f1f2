"""A checkpoint of which something is read in another way than it is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from halfbyte.checkpoints.checkpoint import Checkpoint
from halfbyte.passes.weight import Weight

_SAME = ("path", "format", "config", "layers", "floats", "warnings", "name_of", "tables")


class ChangedCheckpoint(Checkpoint):
    """What ``inner`` holds, except for what a subclass overrides.

    Args:
        inner: the checkpoint.
        changes: other values of its attributes.
    """

    def __init__(self, inner: Checkpoint, **changes: Any) -> None:
        super().__init__(**{key: getattr(inner, key) for key in _SAME} | changes)
        self.inner = inner

    def quantized(self, layer: str) -> Weight:
        return self.inner.quantized(layer)

    def float_tensor(self, name: str) -> torch.Tensor:
        return self.inner.float_tensor(name)

    def permutation(self, layer: str) -> torch.Tensor | None:
        return self.inner.permutation(layer)

    def tokenizer_source(self) -> bytes | None:
        return self.inner.tokenizer_source()

    def save_tokenizer(self, folder: Path) -> list[str]:
        return self.inner.save_tokenizer(folder)
