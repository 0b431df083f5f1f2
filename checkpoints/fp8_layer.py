"""A layer with e4m3 weights: ``W[n, k] = e4m3(weight[n, k]) * scale[block of n, block of k]``.

Files call the scale ``weight_scale`` (compressed-tensors) or ``weight_scale_inv`` (DeepSeek's): both multiply.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halfbyte.checkpoints.contradictions import Contradictions
from halfbyte.checkpoints.float_parameters import missing_tensor
from halfbyte.checkpoints.layer_tensors import SCALE_DTYPES, check, read_scales
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.checkpoints.scale_blocks import ScaleBlocks, settle_blocks
from halfbyte.checkpoints.stored_layer import StoredLayer
from halfbyte.errors import CheckpointError
from halfbyte.passes.scheme import Fp8Scheme
from halfbyte.passes.weight import Fp8Tensor

E4M3 = torch.float8_e4m3fn
_SCALES = ("weight_scale", "weight_scale_inv")


@dataclass(frozen=True, kw_only=True)
class Fp8Layer(StoredLayer):
    """A layer as its tensors have it.

    Attributes:
        blocks: what shares a scale.
        scale: what the tensor of scales is called.
        scale_dtype: ``f16``, ``bf16`` or ``f32``.
        codes: what the weight itself is called.
    """

    blocks: ScaleBlocks
    scale: str
    scale_dtype: str
    codes: str = "weight"

    @property
    def storage(self) -> str:
        return f"fp8 {self.blocks.strategy}"

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.codes, self.scale, "input_scale")

    @property
    def readable(self) -> bool:
        return True

    def scheme(self) -> Fp8Scheme | None:
        if self.why_refused():
            return None
        return Fp8Scheme(self.blocks.outputs, self.blocks.inputs, self.scale_dtype)

    def why_refused(self) -> tuple[str, str] | None:
        if self.blocks.inputs < self.shape[1] and self.blocks.inputs % 8:
            return f"blocks of {self.blocks.inputs} inputs", "a multiple of 8, or scales that span a row"
        return None

    def weight(self, tensors: SafetensorsFolder) -> Fp8Tensor:
        key = f"{self.name}.{self.codes}"
        bits = tensors.read(key).view(torch.uint8)
        bad = int(((bits & 127) == 127).sum())
        if bad:
            raise CheckpointError(
                "there are weights that are no numbers",
                where=key,
                found=f"{bad} NaN of {bits.numel()}",
                accepted="finite numbers",
                advice="the checkpoint is damaged, or its quantization failed",
            )
        scales = read_scales(f"{self.name}.{self.scale}", tensors).reshape(self.blocks.grid(self.shape))
        return Fp8Tensor(self.name, bits, scales, self.blocks.outputs, self.blocks.inputs)

    def dequantized(self, tensors: SafetensorsFolder) -> torch.Tensor:
        return self.weight(tensors).dequantize()


def inspect_fp8(
    name: str,
    shape: tuple[int, int],
    said: ScaleBlocks,
    tensors: SafetensorsFolder,
    contradictions: Contradictions,
    codes: str = "weight",
    scales: tuple[str, ...] = _SCALES,
) -> Fp8Layer:
    """Checks the tensors of a layer with an e4m3 weight.

    Args:
        shape: (N, K) of the layer in the model.
        said: the blocks of the configuration.
        codes: what the weight is called.
        scales: what the tensor of scales may be called.

    Raises:
        CheckpointError: naming layer and tensor: the scale is missing, or one has a wrong shape or dtype.
    """
    check(name, codes, tensors, shape, (E4M3,))
    there = [part for part in scales if f"{name}.{part}" in tensors]
    if not there:
        raise missing_tensor([f"{name}.{part}" for part in scales], tensors, name)
    if len(there) > 1:
        raise CheckpointError(
            "the layer has two tensors of scales, and nothing says which counts",
            where=name,
            found=" and ".join(f"{name}.{part}" for part in there),
            accepted="one of them",
        )
    [scale] = there
    blocks = settle_blocks(name, scale, shape, said, tensors, contradictions)
    dtype = SCALE_DTYPES[tensors[f"{name}.{scale}"].dtype]
    return Fp8Layer(name=name, shape=shape, blocks=blocks, scale=scale, scale_dtype=dtype, codes=codes)
