"""A layer with e2m1 weights in groups: ``W[n, k] = e2m1(code[n, k]) * scale[n, k // group]``.

MXFP4 (OCP Microscaling): groups of 32, scales that are powers of two (e8m0), a byte each. NVFP4: groups of 16, e4m3
scales and one float for the whole tensor. Codes are two to a byte, the even input in the low nibble.

The weight keeps its codes, and half the scale, since `Levels.E2M1` are twice the values: powers of two in bfloat16,
products of an e4m3 number and the tensor's in float32. Both halves are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halfbyte.checkpoints.layer_tensors import check, read_scales, require
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.checkpoints.stored_layer import StoredLayer
from halfbyte.errors import CheckpointError
from halfbyte.passes.levels import Levels
from halfbyte.passes.scheme import WeightScheme, Zero
from halfbyte.passes.weight import QuantTensor, dtype_name
from halfbyte.passes.words import CodeWords

# What kernels take for 0: halves of scales must not fall below it.
_LEAST = 2.0**-126
_SCALE_DTYPES = {"mxfp4": torch.bfloat16, "nvfp4": torch.float32}
# By kind: inputs that share a scale, and how scales are stored.
_GROUPS: dict[str, tuple[int, tuple[torch.dtype, ...]]] = {
    "mxfp4": (32, (torch.uint8, torch.float8_e8m0fnu)),
    "nvfp4": (16, (torch.float8_e4m3fn,)),
}


@dataclass(frozen=True)
class Fp4Names:
    """What a format calls the tensors of a layer.

    Attributes:
        codes: uint8 [N, K / 2], or [N, K / group, group / 2].
        scale: [N, K / group].
        whole: one float for the whole tensor, or nothing.
        divides: scales are divided by it; else multiplied.
        rest: tensors that are there and not used.
    """

    codes: str
    scale: str
    whole: str = ""
    divides: bool = False
    rest: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Fp4Layer(StoredLayer):
    """A layer as its tensors have it.

    Attributes:
        kind: ``mxfp4`` or ``nvfp4``.
        group_size: inputs that share a scale.
        names: of the tensors.
    """

    kind: str
    group_size: int
    names: Fp4Names

    @property
    def storage(self) -> str:
        return self.kind

    @property
    def parts(self) -> tuple[str, ...]:
        named = (self.names.codes, self.names.scale, self.names.whole)
        return tuple(name for name in (*named, *self.names.rest) if name)

    @property
    def readable(self) -> bool:
        return True

    def scheme(self) -> WeightScheme:
        channelwise = self.group_size == self.shape[1]
        scale = dtype_name(_SCALE_DTYPES[self.kind])
        return WeightScheme(self.group_size, channelwise, Zero.SYMMETRIC, scale, levels=Levels.E2M1)

    def why_refused(self) -> None:
        return None

    def weight(self, tensors: SafetensorsFolder) -> QuantTensor:
        weight = self._weight(tensors)
        tiny = weight.scale.float().abs() < _LEAST
        if bool(tiny.any()):  # of groups of zeros scales may well be
            zeros = ((weight.codes & 7) == 0).unflatten(-1, (-1, self.group_size)).all(-1)
            self._check_small(tiny & ~zeros & (weight.scale != 0))
        return weight

    def dequantized(self, tensors: SafetensorsFolder) -> torch.Tensor:
        return self._weight(tensors).dequantize()

    def _weight(self, tensors: SafetensorsFolder) -> QuantTensor:
        octets = tensors.read(f"{self.name}.{self.names.codes}").reshape(self.shape[0], -1)
        codes = CodeWords(octets.contiguous().view(torch.int32), self.shape[1], 4)
        scales = (self._scales(tensors) / 2).to(_SCALE_DTYPES[self.kind])
        return QuantTensor(self.name, codes, scales, self.group_size, levels=Levels.E2M1)

    def _check_small(self, lost: torch.Tensor) -> None:
        if bool(lost.any()):
            output, group = lost.nonzero()[0].tolist()
            raise CheckpointError(
                "a scale is too small: programs take numbers below 2^-126 for 0, and half of it is one",
                where=f"{self.name}.{self.names.scale}",
                found=f"below 2^-125, output {output}, group {group}, beside codes that are not 0",
                accepted="scales of 2^-125 and more, or codes of 0",
                advice="the checkpoint is damaged, or its quantization failed",
            )

    def _scales(self, tensors: SafetensorsFolder) -> torch.Tensor:
        """float32 [N, K / group]."""
        key = f"{self.name}.{self.names.scale}"
        scales = read_scales(key, tensors)
        if not self.names.whole:
            return scales
        whole = read_scales(f"{self.name}.{self.names.whole}", tensors).reshape(())
        if not bool(whole):
            raise CheckpointError(
                "the scale of the whole tensor is 0",
                where=f"{self.name}.{self.names.whole}",
                found="0",
                accepted="another number",
                advice="the checkpoint is damaged, or its quantization failed",
            )
        return scales / whole if self.names.divides else scales * whole


def inspect_fp4(
    name: str, shape: tuple[int, int], kind: str, names: Fp4Names, tensors: SafetensorsFolder
) -> Fp4Layer:
    """Checks the tensors of a layer with e2m1 weights.

    Args:
        shape: (N, K) of the layer in the model.
        kind: ``mxfp4`` or ``nvfp4``.

    Raises:
        CheckpointError: naming layer and tensor: one is missing, or has a wrong shape or dtype.
    """
    require(name, tensors, *(part for part in (names.codes, names.scale, names.whole) if part))
    group, dtypes = _GROUPS[kind]
    if shape[1] % group:
        raise CheckpointError(
            f"{kind} has groups of {group} inputs",
            where=name,
            found=f"{shape[1]} inputs",
            accepted=f"a multiple of {group}",
            advice="config.json and the weights are of different models, or the file is damaged",
        )
    groups = shape[1] // group
    apart = len(tensors[f"{name}.{names.codes}"].shape) == 3
    check(
        name,
        names.codes,
        tensors,
        (shape[0], groups, group // 2) if apart else (shape[0], shape[1] // 2),
        (torch.uint8,),
    )
    check(name, names.scale, tensors, (shape[0], groups), dtypes)
    if names.whole:
        stored = tensors[f"{name}.{names.whole}"].shape
        check(name, names.whole, tensors, () if stored == () else (1,), (torch.float32,))
    return Fp4Layer(name=name, shape=shape, kind=kind, group_size=group, names=names)
