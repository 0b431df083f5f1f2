"""compressed-tensors checkpoints: the files of llmcompressor, and AutoRound's in that form.

Formats pack-quantized, int-quantized, naive-quantized, float-quantized, nvfp4- and mxfp4-pack-quantized, also mixed in
one file.
"""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.checkpoints.compressed_tensors_config import (
    CompressedTensorsConfig,
    compressed_tensors_config,
)
from halfbyte.checkpoints.compressed_tensors_inspection import inspect_layer, is_quantized
from halfbyte.checkpoints.contradictions import Contradictions
from halfbyte.checkpoints.model_folder import ModelFolder
from halfbyte.checkpoints.quantized_folder import QuantizedFolder, open_quantized
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.checkpoints.stored_layer import StoredLayer


@dataclass(frozen=True)
class CompressedTensorsReader:
    """Layers that have a ``weight_packed``, or a ``weight`` of int8 or e4m3; for `glance` see `inspect_layer`."""

    config: CompressedTensorsConfig
    glance: bool
    weights: tuple[str, ...] = ("weight_packed",)

    @property
    def format(self) -> str:
        return self.config.format

    @property
    def where(self) -> str:
        return self.config.where

    def quantizes(self, layer: str) -> bool:
        return self.config.setting(layer) is not None

    def is_quantized(self, layer: str, tensors: SafetensorsFolder) -> bool:
        return is_quantized(layer, tensors)

    def inspect(
        self, name: str, shape: tuple[int, int], tensors: SafetensorsFolder, contradictions: Contradictions
    ) -> StoredLayer:
        return inspect_layer(name, shape, tensors, self.config, contradictions, self.glance)


def open_compressed_tensors(folder: ModelFolder) -> QuantizedFolder:
    """A folder with quant_method ``compressed-tensors``."""
    assert folder.quantization is not None
    config = compressed_tensors_config(folder.quantization)
    folder.warnings.extend(config.notes)
    return open_quantized(folder, CompressedTensorsReader(config, folder.glance))
