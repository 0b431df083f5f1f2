"""w4afp8 checkpoints: int4 weights (experts, as a rule) whose inputs become e4m3, and e4m3 weights for the rest.

Semantics: TensorRT-LLM's quantize_mixed_precision_moe.py, which writes them, and SGLang's and vLLM's readers.
Both kinds of layers have a ``weight_scale_inv``, which multiplies. Scales of inputs that the file brings along
(``input_scale``) are not used: inputs are quantized per token at run time, as vLLM does it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from halfbyte.checkpoints.contradictions import Contradictions
from halfbyte.checkpoints.experts import OLDER_NAMES
from halfbyte.checkpoints.fp8 import Fp8Reader
from halfbyte.checkpoints.fp8_config import STATIC, fp8_config
from halfbyte.checkpoints.integer_layer import Codes, IntegerLayer
from halfbyte.checkpoints.layer_tensors import SCALE_DTYPES, check, read_scales, require
from halfbyte.checkpoints.model_folder import ModelFolder
from halfbyte.checkpoints.quantized_folder import QuantizedFolder, open_quantized
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.checkpoints.stored_layer import StoredLayer
from halfbyte.passes.scheme import Activations
from halfbyte.passes.words import CodeWords

_SIGNS = 0x88  # two's complement nibbles and those with 8 added differ in the highest bit of each


@dataclass(frozen=True, kw_only=True)
class W4afp8Layer(IntegerLayer):
    """A layer with int4 codes: ``weight`` int8 [N, ceil(K / 2)], low nibble = even k, two's complement."""

    g_idx: ClassVar[str] = ""

    @property
    def storage(self) -> str:
        return "w4afp8"

    @property
    def parts(self) -> tuple[str, ...]:
        return ("weight", "weight_scale_inv", "input_scale")

    def tensor_names(self) -> Iterator[str]:
        yield from super().tensor_names()
        yield _other_input_scale(self.name)

    def read(self, tensors: SafetensorsFolder) -> Codes:
        octets = tensors.read(f"{self.name}.weight").view(torch.uint8) ^ _SIGNS
        scales = read_scales(f"{self.name}.weight_scale_inv", tensors)
        zeros = torch.full(scales.shape, 8, dtype=torch.uint8)
        words = torch.nn.functional.pad(octets, (0, -octets.shape[1] % 4)).view(torch.int32)
        return Codes(CodeWords(words, self.shape[1], 4), zeros, scales)


@dataclass(frozen=True)
class W4afp8Reader(Fp8Reader):
    """Layers whose ``weight`` is int8 (two codes per byte) or e4m3."""

    format: str = "w4afp8"

    def is_quantized(self, layer: str, tensors: SafetensorsFolder) -> bool:
        return _is_int4(layer, tensors) or super().is_quantized(layer, tensors)

    def inspect(
        self, name: str, shape: tuple[int, int], tensors: SafetensorsFolder, contradictions: Contradictions
    ) -> StoredLayer:
        if not _is_int4(name, tensors):
            return super().inspect(name, shape, tensors, contradictions)
        if not self.config.quantizes(name):
            contradictions.add(name, f"{self.where} leaves these layers in float, the tensors are int4")
        if f"{name}.input_scale" in tensors or _other_input_scale(name) in tensors:
            contradictions.add(name, STATIC)
        check(name, "weight", tensors, (shape[0], -(-shape[1] // 2)), (torch.int8,))
        require(name, tensors, "weight_scale_inv")
        size = min(self.config.group_size, shape[1])
        groups = -(-shape[1] // size)
        check(name, "weight_scale_inv", tensors, (shape[0], groups), tuple(SCALE_DTYPES))
        return W4afp8Layer(
            name=name,
            shape=shape,
            activations=Activations.FP8,
            bits=4,
            groups=groups,
            group_size=size,
            symmetric=True,
            scale_dtype=SCALE_DTYPES[tensors[f"{name}.weight_scale_inv"].dtype],
        )


def open_w4afp8(folder: ModelFolder) -> QuantizedFolder:
    """A folder with quant_method ``w4afp8``."""
    assert folder.quantization is not None
    config = fp8_config(folder.quantization)
    folder.warnings.extend(config.notes)
    return open_quantized(folder, W4afp8Reader(config))


def _other_input_scale(layer: str) -> str:
    """What a file calls ``input_scale`` where it says w1, w2 and w3 beside gate_proj, down_proj and up_proj."""
    parent, _, leaf = layer.rpartition(".")
    return f"{parent}.{OLDER_NAMES.get(leaf, leaf)}.input_scale"


def _is_int4(layer: str, tensors: SafetensorsFolder) -> bool:
    weight = f"{layer}.weight"
    return weight in tensors and tensors[weight].dtype == torch.int8
