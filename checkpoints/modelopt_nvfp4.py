"""ModelOpt's NVFP4: e2m1 codes in ``weight``, a ``weight_scale`` per group, ``weight_scale_2`` for the tensor.

Semantics: NVIDIA's ModelOpt and vLLM's ``quantization/modelopt.py``, ``W = e2m1 * weight_scale * weight_scale_2``.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from dataclasses import dataclass
from typing import Any

import torch

from halfbyte.checkpoints.contradictions import Contradictions
from halfbyte.checkpoints.fp4_layer import Fp4Names, inspect_fp4
from halfbyte.checkpoints.model_folder import ModelFolder
from halfbyte.checkpoints.quantized_folder import QuantizedFolder, open_quantized
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.checkpoints.stored_layer import StoredLayer
from halfbyte.errors import CheckpointError
from halfbyte.passes.report import Refusal

_NAMES = Fp4Names("weight", "weight_scale", "weight_scale_2", rest=("input_scale",))
_EXCLUDED = ("exclude_modules", "ignore")  # in hf_quant_config.json, in config.json


@dataclass(frozen=True)
class Nvfp4Reader:
    """Layers whose ``weight`` is bytes.

    Attributes:
        excluded: names of layers, of modules around them, or patterns with ``*``.
    """

    where: str
    excluded: tuple[str, ...]
    format: str = "modelopt nvfp4"
    weights: tuple[str, ...] = ("weight",)

    def quantizes(self, layer: str) -> bool:
        inside = (layer == name or layer.startswith(f"{name}.") for name in self.excluded)
        return not any(inside) and not any(fnmatch.fnmatchcase(layer, name) for name in self.excluded)

    def is_quantized(self, layer: str, tensors: SafetensorsFolder) -> bool:
        weight = f"{layer}.weight"
        return weight in tensors and tensors[weight].dtype == torch.uint8

    def inspect(
        self, name: str, shape: tuple[int, int], tensors: SafetensorsFolder, contradictions: Contradictions
    ) -> StoredLayer:
        if not self.quantizes(name):
            contradictions.add(name, f"{self.where} leaves these layers in float, the tensors are quantized")
        layer = inspect_fp4(name, shape, "nvfp4", _NAMES, tensors)
        if f"{name}.input_scale" not in tensors:
            return layer
        refused = Refusal(
            name,
            "activations of fp4 in groups of 16 inputs",
            "8 bits per token, or none",
            "choose with --activations, or compile with --on-unsupported float",
        )
        return dataclasses.replace(layer, refused_activations=refused)


def open_nvfp4(folder: ModelFolder, said: dict[str, Any], where: str) -> QuantizedFolder:
    """A folder with ``quant_algo`` NVFP4.

    Args:
        said: the object with ``quant_algo``.

    Raises:
        CheckpointError: the excluded modules are no list of names, or whatever is wrong with the tensors.
    """
    excluded: list[str] = []
    for key in _EXCLUDED:
        names = said.get(key) or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointError(
                f"{key} is impossible", where=where, found=repr(names)[:100], accepted="a list of names"
            )
        excluded += names
    return open_quantized(folder, Nvfp4Reader(where, tuple(excluded)))
