"""A layer with e2m1 weights in groups: ``W[n, k] = e2m1(code[n, k]) * scale[n, k // group]``.

MXFP4 (OCP Microscaling): groups of 32, scales that are powers of two (e8m0), a byte each. NVFP4: groups of 16, e4m3
scales and one float for the whole tensor. Codes are two to a byte, the even input in the low nibble.

Twice an e2m1 value is a whole number of at most 12, so the weight is one of 8-bit integers and half the scale, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from halfbyte.checkpoints.layer_tensors import check, read_scales, require
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.checkpoints.stored_layer import StoredLayer
from halfbyte.errors import CheckpointError
from halfbyte.passes.scheme import WeightScheme, Zero
from halfbyte.passes.weight import QuantTensor

_TWICE = np.array([0, 1, 2, 3, 4, 6, 8, 12])
# By code; 128 above, as codes of 8 bits are stored.
_CODES = np.concatenate([_TWICE, -_TWICE]) + 128
# By byte: the codes of both nibbles, one behind the other.
_PAIRS = (_CODES[np.arange(256) & 15] | _CODES[np.arange(256) >> 4] << 8).astype("<u2")
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
        return WeightScheme(self.group_size, channelwise, Zero.SYMMETRIC, "f32", bits=8)

    def why_refused(self) -> None:
        return None

    def weight(self, tensors: SafetensorsFolder) -> QuantTensor:
        octets = tensors.read(f"{self.name}.{self.names.codes}").numpy()
        codes = torch.from_numpy(np.take(_PAIRS, octets).view(np.uint8)).reshape(self.shape)
        return QuantTensor(self.name, codes, self._scales(tensors) / 2, self.group_size, bits=8)

    def dequantized(self, tensors: SafetensorsFolder) -> torch.Tensor:
        return self.weight(tensors).dequantize()

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
