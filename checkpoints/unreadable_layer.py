"""A layer whose weight is stored in a way that is not read here."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.checkpoints.stored_layer import StoredLayer
from halfbyte.passes.weight import Weight


@dataclass(frozen=True, kw_only=True)
class UnreadableLayer(StoredLayer):
    """A layer that is refused, for a reason that its headers and the configuration tell.

    Attributes:
        kind: what `storage` says.
        found: what is in the way.
        accepted: what would be read.
        names: see `StoredLayer.parts`.
    """

    kind: str
    found: str
    accepted: str
    names: tuple[str, ...]

    @property
    def storage(self) -> str:
        return self.kind

    @property
    def parts(self) -> tuple[str, ...]:
        return self.names

    @property
    def readable(self) -> bool:
        return False

    def scheme(self) -> None:
        return None

    def why_refused(self) -> tuple[str, str]:
        return self.found, self.accepted

    def weight(self, tensors: SafetensorsFolder) -> Weight:
        raise KeyError(self.name)

    def dequantized(self, tensors: SafetensorsFolder) -> torch.Tensor:
        raise KeyError(self.name)
