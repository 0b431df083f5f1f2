"""One GPTQ layer."""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.checkpoints import gptq_packing as packing
from halfbyte.checkpoints.integer_layer import Codes, IntegerLayer
from halfbyte.checkpoints.layer_tensors import read_scales
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder


@dataclass(frozen=True, kw_only=True)
class GptqLayer(IntegerLayer):
    """A layer as its tensors have it.

    Attributes:
        version: of the zero points.
    """

    version: int

    @property
    def storage(self) -> str:
        return f"gptq v{self.version}" + ("" if self.bits == 4 else f", {self.bits} bits")

    @property
    def parts(self) -> tuple[str, ...]:
        return ("qweight", "qzeros", "scales", "g_idx")

    def read(self, tensors: SafetensorsFolder) -> Codes:
        scales = read_scales(f"{self.name}.scales", tensors).t().contiguous()
        codes = packing.unpack_codes(tensors.read(f"{self.name}.qweight"), self.bits)
        qzeros = tensors.read(f"{self.name}.qzeros")
        zeros = packing.unpack_zeros(qzeros, self.bits, self.version, self.shape[0])
        return Codes(codes, zeros, scales)
