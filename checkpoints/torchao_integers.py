"""torchao's classes of integers, a signed byte per code: IntxUnpackedToInt8Tensor and Int8Tensor.

Semantics: torchao's affine quantization, ``W[n, k] = (q[n, k] - zero_point[n, g]) * scale[n, g]``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halfbyte.checkpoints.input_groups import settle_group_size
from halfbyte.checkpoints.integer_layer import Codes, IntegerLayer
from halfbyte.checkpoints.layer_tensors import SCALE_DTYPES, read_scales
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.checkpoints.signed_codes import unsigned_codes
from halfbyte.checkpoints.torchao_settings import CODES, PARTS, SCALE, ZERO, TorchaoTensor
from halfbyte.passes.ops.int8_roundings import FixedRounding
from halfbyte.passes.scheme import Activations
from halfbyte.passes.weight import scales_by_row

_BITS = {f"int{bits}": bits for bits in range(1, 9)}
_ACTIVATIONS = {None: Activations.NONE, "int8_asym_per_token": Activations.INT8_AFFINE}


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


def inspect_intx(weight: TorchaoTensor) -> TorchaoIntegers:
    """A weight of IntxUnpackedToInt8Tensor, 4 or 8 bits in groups.

    Raises:
        CheckpointError: naming layer and tensor: one is missing, or a setting, shape or dtype is impossible.
    """
    bits, (_, size) = _bits(weight), weight.block_size(whole=False)
    weight.require(CODES, SCALE, ZERO)
    weight.check(CODES, weight.shape, (torch.int8,))
    outputs, inputs = weight.shape
    stored = weight.tensors[f"{weight.name}.{SCALE}"].shape
    groups = min(max(stored[1] if len(stored) == 2 else 0, 1), inputs)
    weight.check(SCALE, (outputs, groups), SCALE_DTYPES)
    weight.check(ZERO, (outputs, groups), (torch.int8,))
    asked = weight.said.get("activation_quantization")
    if not isinstance(asked, str | None) or asked not in _ACTIVATIONS:
        raise weight.impossible("activation_quantization", asked, "int8_asym_per_token or null")
    return TorchaoIntegers(
        name=weight.name,
        shape=weight.shape,
        activations=weight.rounding(_ACTIVATIONS[asked]),
        bits=bits,
        groups=groups,
        group_size=settle_group_size(weight.name, SCALE, inputs, groups, None, size, weight.contradictions),
        symmetric=weight.no_zeros(),
        scale_dtype=weight.scale_dtype,
        rows=outputs,
    )


def inspect_int8(weight: TorchaoTensor) -> TorchaoIntegers:
    """A weight of Int8Tensor, a scale per output or one for all; errors as of `inspect_intx`."""
    outputs, size = weight.block_size(whole=True)
    weight.require(CODES, SCALE)
    weight.check(CODES, weight.shape, (torch.int8,))
    groups, rows = -(-weight.shape[1] // size), weight.shape[0] // outputs
    stored = weight.tensors[f"{weight.name}.{SCALE}"].shape
    alone = (rows, groups) == (1, 1) and stored in ((), (1,))  # one scale for all may have no dimension
    grid = stored if alone else (rows, groups)
    weight.check(SCALE, grid, SCALE_DTYPES)
    if weight.has(ZERO):
        weight.check(ZERO, grid, (torch.int8,))
    activations, fixed = _of_int8(weight)
    return TorchaoIntegers(
        name=weight.name,
        shape=weight.shape,
        activations=activations,
        fixed=fixed,
        bits=8,
        groups=groups,
        group_size=size,
        symmetric=weight.no_zeros(),
        scale_dtype=weight.scale_dtype,
        rows=rows,
    )


def _of_int8(weight: TorchaoTensor) -> tuple[Activations, FixedRounding | None]:
    """What ``act_quant_kwargs`` ask for, as torchao rounds: with a static scale, or per token, in the whole range."""
    asked = weight.said.get("act_quant_kwargs")
    if asked is None:
        return Activations.NONE, None
    said = asked.get("_data") if isinstance(asked, dict) else None
    settings = said if isinstance(said, dict) else {}
    asymmetric = "ASYMMETRIC" in str(settings.get("mapping_type"))
    whole = "PerTensor" in str(settings.get("granularity"))
    reduced = bool(settings.get("reduce_range"))
    if whole and weight.has_static_scales:
        fixed = weight.static_input(not asymmetric, (-64, 63) if reduced else (-128, 127))
        if fixed is not None:
            return Activations.INT8_FIXED, fixed
    elif weight.has_static_scales:
        weight.note("static input scales are not used, inputs are quantized per token")
    if whole or reduced or weight.has_static_scales:
        if asymmetric:
            weight.note("the checkpoint asks for activations with zero points, here they are symmetric")
        return Activations.INT8, None
    return weight.rounding(Activations.INT8_AFFINE_F32 if asymmetric else Activations.INT8_SYMMETRIC), None


def _bits(weight: TorchaoTensor) -> int:
    dtype = weight.said.get("target_dtype")
    text = dtype.get("_data") if isinstance(dtype, dict) else None
    if not isinstance(text, str) or text not in _BITS:
        raise weight.impossible("target_dtype", dtype, "int4 or int8")
    return _BITS[text]
