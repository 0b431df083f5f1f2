"""GPTQ checkpoints (versions 1 and 2), and AutoRound's in the same packing."""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.checkpoints.contradictions import Contradictions
from halfbyte.checkpoints.gptq_config import GptqConfig, auto_round_config, gptq_config
from halfbyte.checkpoints.gptq_inspection import inspect_layer
from halfbyte.checkpoints.gptq_layer import GptqLayer
from halfbyte.checkpoints.model_folder import ModelFolder
from halfbyte.checkpoints.quantized_folder import QuantizedFolder, open_quantized
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder


@dataclass(frozen=True)
class GptqReader:
    """Layers that have a ``qweight``."""

    config: GptqConfig
    weights: tuple[str, ...] = ("qweight",)

    @property
    def format(self) -> str:
        return self.config.format

    @property
    def where(self) -> str:
        return self.config.where

    def quantizes(self, layer: str) -> bool:
        return self.config.setting(layer) is not None

    def is_quantized(self, layer: str, tensors: SafetensorsFolder) -> bool:
        return f"{layer}.qweight" in tensors

    def inspect(
        self, name: str, shape: tuple[int, int], tensors: SafetensorsFolder, contradictions: Contradictions
    ) -> GptqLayer:
        return inspect_layer(name, shape, tensors, self.config, contradictions)


def open_gptq(folder: ModelFolder) -> QuantizedFolder:
    """A folder with quant_method ``gptq``."""
    assert folder.quantization is not None
    return open_quantized(folder, GptqReader(gptq_config(folder.quantization)))


def open_auto_round(folder: ModelFolder) -> QuantizedFolder:
    """A folder with quant_method ``auto-round`` and tensors packed like GPTQ's."""
    assert folder.quantization is not None
    return open_quantized(folder, GptqReader(auto_round_config(folder.quantization)))
