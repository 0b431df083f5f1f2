"""fp8 checkpoints: e4m3 weights with a ``weight_scale_inv`` per block (DeepSeek's), or one scale per tensor."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from halfbyte.checkpoints.contradictions import Contradictions
from halfbyte.checkpoints.fp8_config import STATIC, Fp8Config, fp8_config
from halfbyte.checkpoints.fp8_layer import E4M3, inspect_fp8
from halfbyte.checkpoints.model_folder import ModelFolder
from halfbyte.checkpoints.quantized_folder import QuantizedFolder, open_quantized
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.checkpoints.stored_layer import StoredLayer
from halfbyte.passes.scheme import Activations


@dataclass(frozen=True)
class Fp8Reader:
    """Layers whose ``weight`` is e4m3."""

    config: Fp8Config
    format: str = "fp8"
    weights: tuple[str, ...] = ("weight",)

    @property
    def where(self) -> str:
        return self.config.where

    def quantizes(self, layer: str) -> bool:
        return self.config.quantizes(layer)

    def is_quantized(self, layer: str, tensors: SafetensorsFolder) -> bool:
        weight = f"{layer}.weight"
        return weight in tensors and tensors[weight].dtype == E4M3

    def inspect(
        self, name: str, shape: tuple[int, int], tensors: SafetensorsFolder, contradictions: Contradictions
    ) -> StoredLayer:
        if not self.config.quantizes(name):
            contradictions.add(name, f"{self.where} leaves these layers in float, the tensors are e4m3")
        if f"{name}.input_scale" in tensors:
            contradictions.add(name, STATIC)
        layer = inspect_fp8(name, shape, self.config.blocks(shape), tensors, contradictions)
        return dataclasses.replace(layer, activations=Activations.FP8)


def open_fp8(folder: ModelFolder) -> QuantizedFolder:
    """A folder with quant_method ``fp8``."""
    assert folder.quantization is not None
    config = fp8_config(folder.quantization)
    folder.warnings.extend(config.notes)
    return open_quantized(folder, Fp8Reader(config))
