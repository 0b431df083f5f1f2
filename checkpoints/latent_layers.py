"""A checkpoint whose model attends over latents: the layers that would expand them are read in float."""

from __future__ import annotations

from dataclasses import replace

import torch

from halfbyte.checkpoints.changed_checkpoint import ChangedCheckpoint
from halfbyte.checkpoints.checkpoint import Checkpoint, FloatInfo, LayerInfo
from halfbyte.checkpoints.model_config import LATENT
from halfbyte.passes.scheme import Activations

EXPANDING, COMPRESSING = "kv_b_proj", "kv_a_proj_with_mqa"
_REASON = "each head's half multiplies its queries and its results, in float, beside a cache of latents"


def has_latents(checkpoint: Checkpoint) -> bool:
    """Whether the model has latent attention."""
    return checkpoint.config["model_type"] in LATENT


def latent_columns(checkpoint: Checkpoint) -> int:
    """Of a position in a cache of latents, the rotated key included: what a layer compresses its input to."""
    compressing = (layer for layer in checkpoint.layers.values() if layer.name.endswith(f".{COMPRESSING}"))
    return max(layer.shape[0] for layer in compressing)


def with_latents(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with its ``kv_b_proj`` in float: their weights are dequantized when they are read."""
    return _Latents(checkpoint)


class _Latents(ChangedCheckpoint):
    def __init__(self, inner: Checkpoint) -> None:
        layers = {name: _in_float(layer) for name, layer in inner.layers.items()}
        self._read = {
            f"{name}.weight": name
            for name, layer in inner.layers.items()
            if layers[name].scheme != layer.scheme
        }
        dequantized = {
            name: FloatInfo(inner.layers[layer].shape, torch.float32) for name, layer in self._read.items()
        }
        super().__init__(inner, layers=layers, floats={**inner.floats, **dequantized})

    def float_tensor(self, name: str) -> torch.Tensor:
        layer = self._read.get(name)
        return self.inner.float_tensor(name) if layer is None else self.inner.quantized(layer).dequantize()


def _in_float(layer: LayerInfo) -> LayerInfo:
    if layer.name.rpartition(".")[2] != EXPANDING or layer.refusal is not None:
        return layer
    none = Activations.NONE
    return replace(layer, scheme=None, activations=none, refused_activations=None, fixed=None, reason=_REASON)
