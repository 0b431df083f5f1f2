"""Reading layers in packed words (``qweight``, ``qzeros``, ``scales``): GPTQ, AWQ and AutoRound."""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.checkpoints.contradictions import Contradictions
from halfbyte.checkpoints.model_folder import ModelFolder
from halfbyte.checkpoints.packed_config import PackedConfig
from halfbyte.checkpoints.packed_inspection import inspect_layer
from halfbyte.checkpoints.packed_layer import PackedLayer
from halfbyte.checkpoints.quantized_folder import QuantizedFolder, open_quantized
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder


@dataclass(frozen=True)
class PackedReader:
    """Layers that have a ``qweight``; for `glance` see `inspect_layer`."""

    config: PackedConfig
    glance: bool
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
    ) -> PackedLayer:
        return inspect_layer(name, shape, tensors, self.config, contradictions, self.glance)


def open_packed(folder: ModelFolder, config: PackedConfig) -> QuantizedFolder:
    """Opens a folder whose configuration has been read.

    Raises:
        CheckpointError: a tensor is missing, has a wrong shape or dtype, or impossible values.
    """
    return open_quantized(folder, PackedReader(config, folder.glance))
