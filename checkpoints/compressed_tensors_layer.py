"""Integer layers of compressed-tensors: codes packed into words, or one code per byte.

``W[n, k] = (q[n, k] - zero_point[n, g(k)]) * weight_scale[n, g(k)]`` with signed q. Words hold q + 8 (q + 128 of
8 bits) along K, zero points in words the same along N; codes and zero points in bytes are signed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from halfbyte.checkpoints.integer_layer import Codes, IntegerLayer
from halfbyte.checkpoints.layer_tensors import read_scales
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.checkpoints.scale_blocks import ScaleBlocks
from halfbyte.checkpoints.signed_codes import unsigned_codes
from halfbyte.errors import CheckpointError
from halfbyte.passes.weight import scales_by_row
from halfbyte.passes.words import CodeWords, fields, words_for

PARTS = (
    "weight_packed",
    "weight",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "weight_global_scale",
    "input_global_scale",
    "input_scale",
    "input_zero_point",
    "output_scale",
    "output_zero_point",
)


@dataclass(frozen=True, kw_only=True)
class CompressedTensorsLayer(IntegerLayer):
    """A layer as its tensors have it.

    Attributes:
        blocks: what shares a scale.
        packed: codes are in words (``weight_packed``), else in bytes (``weight``).
    """

    blocks: ScaleBlocks
    packed: bool
    g_idx: ClassVar[str] = "weight_g_idx"

    @property
    def storage(self) -> str:
        return ("ct packed" if self.packed else "ct int") + ("" if self.bits == 4 else f", {self.bits} bits")

    @property
    def parts(self) -> tuple[str, ...]:
        return PARTS

    def read(self, tensors: SafetensorsFolder) -> Codes:
        scales = read_scales(f"{self.name}.weight_scale", tensors).reshape(-1, self.groups)
        grid = (scales.shape[0], self.groups)
        zeros = read_zeros(self.name, grid, self.bits, tensors)
        if zeros is None:
            zeros = torch.full(grid, 1 << (self.bits - 1), dtype=torch.uint8)
        return Codes(self._codes(tensors), self._by_row(zeros), self._by_row(scales))

    def _by_row(self, values: torch.Tensor) -> torch.Tensor:
        return scales_by_row(values, self.shape[0], self.blocks.outputs).contiguous()

    def _codes(self, tensors: SafetensorsFolder) -> torch.Tensor | CodeWords:
        if self.packed:
            return CodeWords(tensors.read(f"{self.name}.weight_packed"), self.shape[1], self.bits)
        return unsigned_codes(f"{self.name}.weight", self.bits, tensors)


def read_zeros(
    name: str, grid: tuple[int, int], bits: int, tensors: SafetensorsFolder
) -> torch.Tensor | None:
    """uint8 of the shape `grid`, one for every scale; None where the file has no zero points.

    Raises:
        CheckpointError: they are neither words packed along N nor bytes, or out of range.
    """
    key = f"{name}.weight_zero_point"
    if key not in tensors:
        return None
    if are_words(name, grid, bits, tensors):
        return fields(tensors.read(key).t().contiguous(), bits)[:, : grid[0]].t().contiguous()
    return unsigned_codes(key, bits, tensors).reshape(grid)


def are_words(name: str, grid: tuple[int, int], bits: int, tensors: SafetensorsFolder) -> bool:
    """Whether the zero points of a layer are words packed along N; else they are bytes.

    Raises:
        CheckpointError: they are neither.
    """
    key = f"{name}.weight_zero_point"
    stored, packed = tensors[key], (words_for(grid[0], bits), grid[1])
    if stored.dtype == torch.int32 and stored.shape == packed:
        return True
    if stored.dtype == torch.int8 and stored.shape in (grid, tensors[f"{name}.weight_scale"].shape):
        return False
    raise CheckpointError(
        "weight_zero_point does not fit the layer",
        where=key,
        found=f"{str(stored.dtype).removeprefix('torch.')} {list(stored.shape)}",
        accepted=f"int32 {list(packed)} (packed along the outputs) or int8 {list(grid)}",
        advice="config.json and the weights are of different models, or the file is damaged",
    )
