"""torchao's classes of integers, a signed byte per code: IntxUnpackedToInt8Tensor and Int8Tensor.

Semantics: torchao's affine quantization, ``W[n, k] = (q[n, k] - zero_point[n, g]) * scale[n, g]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from halfbyte.checkpoints.contradictions import Contradictions
from halfbyte.checkpoints.input_groups import settle_group_size
from halfbyte.checkpoints.integer_layer import Codes, IntegerLayer
from halfbyte.checkpoints.layer_tensors import SCALE_DTYPES, check, read_scales, require
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.checkpoints.signed_codes import unsigned_codes
from halfbyte.checkpoints.torchao_settings import (
    CODES,
    PARTS,
    SCALE,
    ZERO,
    block_size,
    impossible,
    note_static_scales,
    refuse_weighed_inputs,
)
from halfbyte.passes.scheme import Activations
from halfbyte.passes.weight import scales_by_row

_BITS = {f"int{bits}": bits for bits in range(1, 9)}
_ACTIVATIONS = {None: Activations.NONE, "int8_asym_per_token": Activations.INT8}
_ASYMMETRIC = "the checkpoint asks for activations with zero points, here they are symmetric"


@dataclass(frozen=True, kw_only=True)
class TorchaoIntegers(IntegerLayer):
    """A layer as its tensors have it.

    Attributes:
        rows: of scales: N, or 1 for one scale of the whole tensor.
    """

    rows: int

    @property
    def storage(self) -> str:
        return "torchao" + ("" if self.bits == 4 else f", {self.bits} bits")

    @property
    def parts(self) -> tuple[str, ...]:
        return PARTS

    def read(self, tensors: SafetensorsFolder) -> Codes:
        grid = (self.rows, self.groups)
        scales = read_scales(f"{self.name}.{SCALE}", tensors).reshape(grid)
        codes = unsigned_codes(f"{self.name}.{CODES}", self.bits, tensors)
        if f"{self.name}.{ZERO}" in tensors:
            zeros = unsigned_codes(f"{self.name}.{ZERO}", self.bits, tensors).reshape(grid)
        else:
            zeros = torch.full(grid, 1 << (self.bits - 1), dtype=torch.uint8)
        shared = self.shape[0] // self.rows
        return Codes(codes, *(scales_by_row(part, self.shape[0], shared) for part in (zeros, scales)))


def inspect_intx(
    name: str,
    shape: tuple[int, int],
    said: dict[str, Any],
    tensors: SafetensorsFolder,
    contradictions: Contradictions,
) -> TorchaoIntegers:
    """A weight of IntxUnpackedToInt8Tensor, 4 or 8 bits in groups.

    Args:
        shape: (N, K) of the layer in the model.
        said: the settings of the tensor.

    Raises:
        CheckpointError: naming layer and tensor: one is missing, or a setting, shape or dtype is impossible.
    """
    bits, (_, size) = _bits(name, said), block_size(name, said, shape, whole=False)
    require(name, tensors, CODES, SCALE, ZERO)
    check(name, CODES, tensors, shape, (torch.int8,))
    stored = tensors[f"{name}.{SCALE}"]
    groups = min(max(stored.shape[1] if len(stored.shape) == 2 else 0, 1), shape[1])
    check(name, SCALE, tensors, (shape[0], groups), tuple(SCALE_DTYPES))
    check(name, ZERO, tensors, (shape[0], groups), (torch.int8,))
    asked = said.get("activation_quantization")
    if not isinstance(asked, str | None) or asked not in _ACTIVATIONS:
        raise impossible(name, "activation_quantization", asked, "int8_asym_per_token or null")
    if asked is not None:
        contradictions.add(name, _ASYMMETRIC)
    return TorchaoIntegers(
        name=name,
        shape=shape,
        activations=_ACTIVATIONS[asked],
        bits=bits,
        groups=groups,
        group_size=settle_group_size(name, SCALE, shape[1], groups, None, size, contradictions),
        symmetric=_symmetric(name, tensors),
        scale_dtype=SCALE_DTYPES[stored.dtype],
        rows=shape[0],
    )


def inspect_int8(
    name: str,
    shape: tuple[int, int],
    said: dict[str, Any],
    tensors: SafetensorsFolder,
    contradictions: Contradictions,
) -> TorchaoIntegers:
    """A weight of Int8Tensor, a scale per output or one for all; arguments and errors as of `inspect_intx`."""
    outputs, size = block_size(name, said, shape, whole=True)
    require(name, tensors, CODES, SCALE)
    refuse_weighed_inputs(name, tensors)
    check(name, CODES, tensors, shape, (torch.int8,))
    groups, rows = -(-shape[1] // size), shape[0] // outputs
    # One scale for all may have no dimension.
    grid = tensors[f"{name}.{SCALE}"].shape if (rows, groups) == (1, 1) else (rows, groups)
    grid = grid if grid in ((), (1,), (1, 1)) else (rows, groups)
    check(name, SCALE, tensors, grid, tuple(SCALE_DTYPES))
    if f"{name}.{ZERO}" in tensors:
        check(name, ZERO, tensors, grid, (torch.int8,))
    asked = said.get("act_quant_kwargs")
    note_static_scales(name, tensors, contradictions)
    if "ASYMMETRIC" in str(asked):
        contradictions.add(name, _ASYMMETRIC)
    return TorchaoIntegers(
        name=name,
        shape=shape,
        activations=Activations.NONE if asked is None else Activations.INT8,
        bits=8,
        groups=groups,
        group_size=size,
        symmetric=_symmetric(name, tensors),
        scale_dtype=SCALE_DTYPES[tensors[f"{name}.{SCALE}"].dtype],
        rows=rows,
    )


def _symmetric(name: str, tensors: SafetensorsFolder) -> bool:
    return f"{name}.{ZERO}" not in tensors or not bool(tensors.read(f"{name}.{ZERO}").any())


def _bits(name: str, said: dict[str, Any]) -> int:
    dtype = said.get("target_dtype")
    text = dtype.get("_data") if isinstance(dtype, dict) else None
    if not isinstance(text, str) or text not in _BITS:
        raise impossible(name, "target_dtype", dtype, "int4 or int8")
    return _BITS[text]
