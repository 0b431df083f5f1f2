"""One layer of packed words."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halfbyte.checkpoints.integer_layer import Codes, IntegerLayer
from halfbyte.checkpoints.layer_tensors import read_scales
from halfbyte.checkpoints.packing import Packing
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder


@dataclass(frozen=True, kw_only=True)
class PackedLayer(IntegerLayer):
    """A layer as its tensors have it.

    Attributes:
        packing: the layout of its words.
    """

    packing: Packing

    @property
    def storage(self) -> str:
        return self.packing.storage + ("" if self.bits == 4 else f", {self.bits} bits")

    @property
    def parts(self) -> tuple[str, ...]:
        return ("qweight", "qzeros", "scales", "g_idx")

    @property
    def widths(self) -> tuple[int, ...]:
        return self.packing.widths

    def read(self, tensors: SafetensorsFolder) -> Codes:
        scales = read_scales(f"{self.name}.scales", tensors).t().contiguous()
        codes = self.packing.codes(tensors.read(f"{self.name}.qweight"), self.shape, self.bits)
        if self.symmetric:
            zeros = torch.full(scales.shape, 1 << (self.bits - 1), dtype=torch.uint8)
        else:
            zeros = self.packing.zeros(tensors.read(f"{self.name}.qzeros"), self.shape[0], self.bits)
        return Codes(codes, zeros, scales)
