"""torchao's Int4Tensor: signed nibbles, the even input in the low one, scales and offsets [groups, N].

Semantics: torchao's ``Int4Tensor`` and MSLK's ``int4_row_quantize_zp``, ``W[n, k] = q[n, k] * scale[g, n] +
zero_point[g, n]``: the "zero point" is the weight of the code 0, a float.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halfbyte.checkpoints.input_groups import settle_group_size
from halfbyte.checkpoints.layer_tensors import SCALE_DTYPES, read_scales
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.checkpoints.stored_layer import StoredLayer
from halfbyte.checkpoints.torchao_settings import CODES, PARTS, SCALE, ZERO, TorchaoTensor
from halfbyte.passes.scheme import Activations, WeightScheme, Zero
from halfbyte.passes.weight import QuantTensor

_MIDDLE = 8
_ACTIVATIONS = {"bfloat16": Activations.NONE, "float8_e4m3fn": Activations.FP8}


@dataclass(frozen=True, kw_only=True)
class TorchaoInt4(StoredLayer):
    """A layer as its tensors have it.

    Attributes:
        group_size: inputs that share a scale.
        symmetric: all offsets are 0.
        scale_dtype: ``f16``, ``bf16`` or ``f32``.
    """

    group_size: int
    symmetric: bool
    scale_dtype: str

    @property
    def storage(self) -> str:
        return "torchao"

    @property
    def parts(self) -> tuple[str, ...]:
        return PARTS

    @property
    def readable(self) -> bool:
        return True

    def scheme(self) -> WeightScheme | None:
        if self.why_refused():
            return None
        zero, dtype = (Zero.SYMMETRIC, self.scale_dtype) if self.symmetric else (Zero.MINIMUM, "f32")
        return WeightScheme(self.group_size, self.group_size == self.shape[1], zero, dtype)

    def why_refused(self) -> tuple[str, str] | None:
        if self.group_size % 8 and self.group_size != self.shape[1]:
            return f"group_size = {self.group_size}", "a multiple of 8, or all inputs"
        return None

    def weight(self, tensors: SafetensorsFolder) -> QuantTensor:
        octets = tensors.read(f"{self.name}.{CODES}").view(torch.uint8) ^ (_MIDDLE * 17)
        codes = torch.stack([octets & 15, octets >> 4], -1).reshape(self.shape)
        scale, offset = (read_scales(f"{self.name}.{part}", tensors).T.contiguous() for part in (SCALE, ZERO))
        if self.symmetric:
            return QuantTensor(self.name, codes, scale, self.group_size)
        scale = scale.float()
        return QuantTensor(self.name, codes, scale, self.group_size, minimum=offset.float() - _MIDDLE * scale)

    def dequantized(self, tensors: SafetensorsFolder) -> torch.Tensor:
        return self.weight(tensors).dequantize()


def inspect_int4(weight: TorchaoTensor) -> TorchaoInt4:
    """A weight of Int4Tensor.

    Raises:
        CheckpointError: naming layer and tensor: one is missing, or a setting, shape or dtype is impossible.
    """
    _, size = weight.block_size(whole=False)
    weight.require(CODES, SCALE, ZERO)
    outputs, inputs = weight.shape
    if inputs % 2:
        raise weight.impossible("shape", list(weight.shape), "an even number of inputs, two to a byte")
    weight.check(CODES, (outputs, inputs // 2), (torch.int8, torch.uint8))
    groups = -(-inputs // size)
    for part in (SCALE, ZERO):
        weight.check(part, (groups, outputs), SCALE_DTYPES, " (groups first)")
    asked = weight.said.get("activation_dtype")
    dtype = asked.get("_data") if isinstance(asked, dict) else "bfloat16" if asked is None else asked
    if not isinstance(dtype, str) or dtype not in _ACTIVATIONS:
        raise weight.impossible("activation_dtype", asked, " or ".join(_ACTIVATIONS))
    return TorchaoInt4(
        name=weight.name,
        shape=weight.shape,
        activations=_ACTIVATIONS[dtype],
        group_size=settle_group_size(weight.name, SCALE, inputs, groups, None, size, weight.contradictions),
        symmetric=weight.no_zeros(),
        scale_dtype=weight.scale_dtype,
    )
