"""A folder with quantized layers, whatever their format: which layers are quantized, and what becomes of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from halfbyte.checkpoints.checkpoint import FloatInfo, LayerInfo
from halfbyte.checkpoints.contradictions import Contradictions
from halfbyte.checkpoints.float_folder import FolderCheckpoint
from halfbyte.checkpoints.model_folder import ModelFolder, refuse_both, require_weight
from halfbyte.checkpoints.names_in_file import is_head
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.checkpoints.stored_layer import StoredLayer
from halfbyte.passes.report import Refusal
from halfbyte.passes.weight import Weight


class LayerReader(Protocol):
    """What a format knows: its configuration, and how to look at the tensors of one layer."""

    @property
    def format(self) -> str:
        """In words, e.g. ``gptq v1``."""
        ...

    @property
    def where(self) -> str:
        """Where the configuration was found."""
        ...

    @property
    def weights(self) -> tuple[str, ...]:
        """What the weight of a quantized layer may be called; the usual name first."""
        ...

    def quantizes(self, layer: str) -> bool:
        """Whether the configuration says that this layer is quantized."""
        ...

    def is_quantized(self, layer: str, tensors: SafetensorsFolder) -> bool:
        """Whether the tensors say so."""
        ...

    def inspect(
        self, name: str, shape: tuple[int, int], tensors: SafetensorsFolder, contradictions: Contradictions
    ) -> StoredLayer:
        """Checks the tensors of a quantized layer of logical shape (N, K) by their headers.

        Raises:
            CheckpointError: naming layer and tensor: one is missing, has a wrong shape or dtype, or impossible
                values.
        """
        ...


@dataclass(kw_only=True)
class QuantizedFolder(FolderCheckpoint):
    """A folder of safetensors with quantized layers.

    Attributes:
        stored: every layer with quantized tensors, those that cannot be compiled included.
    """

    stored: dict[str, StoredLayer]

    def quantized(self, layer: str) -> Weight:
        if self.layers[layer].scheme is None:
            raise KeyError(layer)
        return self.stored[layer].weight(self.tensors)

    def float_tensor(self, name: str) -> torch.Tensor:
        found = self.stored.get(name.removesuffix(".weight"))
        if name not in self.floats or found is None or not name.endswith(".weight"):
            return super().float_tensor(name)
        return found.dequantized(self.tensors)

    def permutation(self, layer: str) -> torch.Tensor | None:
        found = self.stored.get(layer)
        return None if found is None else found.permutation(self.tensors)


def open_quantized(folder: ModelFolder, reader: LayerReader) -> QuantizedFolder:
    """Decides for every linear of the model what it is; where configuration and tensors disagree the tensors count.

    Raises:
        CheckpointError: whatever is wrong with the tensors.
    """
    contradictions = Contradictions()
    found: dict[str, StoredLayer] = {}
    for name, linear in folder.architecture.linears.items():
        if reader.is_quantized(name, folder.tensors):
            for part in reader.weights:
                if part != "weight" and f"{name}.{part}" in folder.tensors:
                    refuse_both(name, folder, part)
            found[name] = reader.inspect(name, linear.shape, folder.tensors, contradictions)
        elif f"{name}.weight" in folder.tensors and reader.quantizes(name):
            contradictions.add(name, f"{reader.where} quantizes these layers, the tensors are float")
        elif not is_head(name) and reader.quantizes(name):
            require_weight(name, folder, reader.weights[0])
    parts = [part for layer in found.values() for part in layer.tensor_names()]
    floats, float_layers = folder.float_parts(found, parts)
    folder.warnings.extend(contradictions.warnings())
    layers = float_layers | {name: _info(layer, folder) for name, layer in found.items()}
    return QuantizedFolder(
        path=folder.path,
        format=reader.format,
        config=folder.config,
        layers={name: layers[name] for name in folder.architecture.linears if name in layers},
        floats=floats | _dequantized(found),
        warnings=folder.warnings,
        name_of=folder.name_of,
        tensors=folder.tensors,
        stored=found,
    )


def _info(layer: StoredLayer, folder: ModelFolder) -> LayerInfo:
    refusal = None
    if (why := layer.why_refused()) is not None:
        refusal = Refusal(layer.name, *why, "quantize the layer anew, or compile with --on-unsupported float")
        if not layer.readable:
            refusal = Refusal(layer.name, *why, f"quantize the layer anew with {why[1]}")
    return LayerInfo(
        layer.name,
        layer.shape,
        layer.storage,
        layer.scheme(),
        layer.activations,
        bias=folder.architecture.linears[layer.name].bias,
        refusal=refusal,
        refused_activations=layer.refused_activations,
        fixed=layer.fixed,
    )


def _dequantized(layers: dict[str, StoredLayer]) -> dict[str, FloatInfo]:
    return {
        f"{name}.weight": FloatInfo(layer.shape, torch.float32)
        for name, layer in layers.items()
        if layer.scheme() is None and layer.readable
    }
