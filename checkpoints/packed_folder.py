"""A folder of layers in packed words (``qweight``, ``qzeros``, ``scales``): GPTQ, AWQ and AutoRound."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halfbyte.checkpoints.checkpoint import FloatInfo, LayerInfo
from halfbyte.checkpoints.contradictions import Contradictions
from halfbyte.checkpoints.float_folder import FolderCheckpoint
from halfbyte.checkpoints.model_folder import ModelFolder, refuse_both, require_weight
from halfbyte.checkpoints.packed_config import PackedConfig
from halfbyte.checkpoints.packed_inspection import inspect_layer, read_g_idx
from halfbyte.checkpoints.packed_layer import PackedLayer
from halfbyte.checkpoints.packing import dequantize, sequential
from halfbyte.errors import CheckpointError
from halfbyte.passes.report import Refusal
from halfbyte.passes.weight import QuantTensor

_PARTS = ("qweight", "qzeros", "scales", "g_idx")


@dataclass(kw_only=True)
class PackedCheckpoint(FolderCheckpoint):
    """A folder of packed layers.

    Attributes:
        quantized_layers: every layer with quantized tensors, 8-bit ones included.
    """

    quantized_layers: dict[str, PackedLayer]

    def quantized(self, layer: str) -> QuantTensor:
        if self.layers[layer].scheme is None:
            raise KeyError(layer)
        found = self.quantized_layers[layer]
        codes, zeros, scales, _ = self._read(found)
        order = self.permutation(layer)
        if order is not None:
            codes = codes[:, order]
        zero = None if found.symmetric else zeros
        return QuantTensor(layer, codes, scales, found.group_size, zero, permutation=order, bits=found.bits)

    def float_tensor(self, name: str) -> torch.Tensor:
        found = self.quantized_layers.get(name.removesuffix(".weight"))
        if name not in self.floats or found is None or not name.endswith(".weight"):
            return super().float_tensor(name)
        return dequantize(*self._read(found))

    def permutation(self, layer: str) -> torch.Tensor | None:
        found = self.quantized_layers.get(layer)
        if found is None or not found.act_order:
            return None
        g_idx = read_g_idx(layer, found.shape[1], found.groups, self.tensors)
        return None if g_idx is None else torch.argsort(g_idx, stable=True)

    def _read(self, layer: PackedLayer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """codes uint8 [N, K] as stored, zeros uint8 [N, G], scales [N, G], group of every input int64 [K]."""
        outputs, inputs = layer.shape
        scales = self.tensors.read(f"{layer.name}.scales").t().contiguous()
        bad = int((~torch.isfinite(scales)).sum())
        if bad:
            raise CheckpointError(
                "there are scales that are no numbers",
                where=f"{layer.name}.scales",
                found=f"{bad} NaN or infinite of {scales.numel()}",
                accepted="finite numbers",
                advice="the checkpoint is damaged, or its quantization failed",
            )
        codes = layer.packing.codes(self.tensors.read(f"{layer.name}.qweight"), layer.shape, layer.bits)
        zeros = torch.full(scales.shape, 1 << (layer.bits - 1), dtype=torch.uint8)
        if not layer.symmetric:
            zeros = layer.packing.zeros(self.tensors.read(f"{layer.name}.qzeros"), outputs, layer.bits)
        group = read_g_idx(layer.name, inputs, layer.groups, self.tensors)
        if group is None:
            group = sequential(layer.group_size, inputs)
        return codes, zeros, scales, group


def open_packed(folder: ModelFolder, config: PackedConfig) -> PackedCheckpoint:
    """Opens a folder whose configuration has been read.

    Raises:
        CheckpointError: a tensor is missing, has a wrong shape or dtype, or impossible values.
    """
    contradictions = Contradictions()
    found: dict[str, PackedLayer] = {}
    for name, linear in folder.architecture.linears.items():
        if f"{name}.qweight" in folder.tensors:
            refuse_both(name, folder, "qweight")
            found[name] = inspect_layer(name, linear.shape, folder.tensors, config, contradictions)
        elif f"{name}.weight" in folder.tensors and config.setting(name) is not None:
            contradictions.add(name, f"{config.where} quantizes these layers, the tensors are float")
        elif name != "lm_head" and config.setting(name) is not None:
            require_weight(name, folder, "qweight")
    floats, float_layers = folder.float_parts(found, [f"{name}.{part}" for name in found for part in _PARTS])
    folder.warnings.extend(contradictions.warnings())
    layers = float_layers | {name: _info(layer, folder) for name, layer in found.items()}
    return PackedCheckpoint(
        path=folder.path,
        format=config.format,
        config=folder.config,
        layers={name: layers[name] for name in folder.architecture.linears if name in layers},
        floats=floats | _dequantized(found),
        warnings=folder.warnings,
        tensors=folder.tensors,
        quantized_layers=found,
    )


def _info(layer: PackedLayer, folder: ModelFolder) -> LayerInfo:
    refusal = None
    if (why := layer.why_refused()) is not None:
        refusal = Refusal(layer.name, *why, "quantize the layer anew, or compile with --on-unsupported float")
        if not layer.readable:
            refusal = Refusal(
                layer.name, *why, f"quantize the layer anew with {why[1].removeprefix('bits = ')} bits"
            )
    bias = folder.architecture.linears[layer.name].bias
    return LayerInfo(layer.name, layer.shape, layer.storage, layer.scheme(), bias=bias, refusal=refusal)


def _dequantized(layers: dict[str, PackedLayer]) -> dict[str, FloatInfo]:
    return {
        f"{name}.weight": FloatInfo(layer.shape, torch.float32)
        for name, layer in layers.items()
        if layer.scheme() is None and layer.readable
    }
