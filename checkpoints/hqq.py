"""HQQ checkpoints in safetensors: codes in halves of bytes, fractional zero points, settings as tensors of their own.

Semantics: hqq's ``core/quantize.py`` and ``core/bitpack.py``, ``W = (u - zero) * scale`` over the weight reshaped to
[N * K / group_size, group_size] (axis 1) or [group_size, N * K / group_size] (axis 0). ``4bit_u8`` holds the first
half of the rows of that matrix in high nibbles and the second half in low ones. A zero point need not be an integer, so
the weight is read as ``u * scale + minimum`` with the minimum ``-zero * scale``, exact as float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halfbyte.checkpoints.contradictions import Contradictions
from halfbyte.checkpoints.integer_layer import READABLE_BITS
from halfbyte.checkpoints.layer_tensors import check, read_scales, require
from halfbyte.checkpoints.model_folder import ModelFolder
from halfbyte.checkpoints.quantized_folder import QuantizedFolder, open_quantized
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.checkpoints.stored_layer import StoredLayer
from halfbyte.errors import CheckpointError
from halfbyte.passes.scheme import WeightScheme, Zero
from halfbyte.passes.weight import QuantTensor

CODES = "W_q"
_SETTINGS = ("nbits", "group_size", "axis")
_FLAGS = ("quant_scale", "quant_zero", "view_as_float")
_REST = ("channel_wise", "compute_dtype", "encoded_state_dict", "offload_meta", "optimize", "packing", "round_zero",
         "shape", "stores_quant_config", "unpack_view_dtype")  # fmt: skip
_FLOATS = (torch.float16, torch.bfloat16)  # products of two of them are exact as float32


@dataclass(frozen=True, kw_only=True)
class HqqLayer(StoredLayer):
    """A layer as its tensors have it.

    Attributes:
        bits: 4 or 8, or another width (then nothing else is known).
        group_size: numbers that share a scale.
        axis: 1: groups are neighbours in the weight; 0: they are as far apart as there are groups.
    """

    bits: int
    group_size: int = 0
    axis: int = 1

    @property
    def storage(self) -> str:
        return "hqq" + ("" if self.bits == 4 else f", {self.bits} bits")

    @property
    def parts(self) -> tuple[str, ...]:
        return (CODES, "scale", "zero", *_SETTINGS, *_FLAGS, *_REST)

    @property
    def readable(self) -> bool:
        return self.bits in READABLE_BITS

    def scheme(self) -> WeightScheme | None:
        if self.why_refused():
            return None
        channelwise = self.group_size == self.shape[1]
        return WeightScheme(self.group_size, channelwise, Zero.MINIMUM, "f32", bits=self.bits)

    def why_refused(self) -> tuple[str, str] | None:
        if not self.readable:
            return f"bits = {self.bits}", f"bits = {' or '.join(map(str, READABLE_BITS))}"
        inputs = self.shape[1]
        if self.axis != 1 or inputs % self.group_size:
            return f"axis {self.axis}, groups of {self.group_size} of {inputs} inputs", "axis 1, whole groups"
        if self.group_size % 8 and self.group_size != inputs:
            return f"group_size = {self.group_size}", "a multiple of 8, or all inputs"
        return None

    def weight(self, tensors: SafetensorsFolder) -> QuantTensor:
        codes, scale, minimum = self._read(tensors)
        rows = self.shape[0]
        grid = (rows, -1)
        parts = (codes.reshape(self.shape), scale.reshape(grid), self.group_size)
        return QuantTensor(self.name, *parts, minimum=minimum.reshape(grid), bits=self.bits)

    def dequantized(self, tensors: SafetensorsFolder) -> torch.Tensor:
        codes, scale, minimum = self._read(tensors)
        return (codes.float() * scale + minimum).reshape(self.shape)

    def _read(self, tensors: SafetensorsFolder) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """codes uint8 [R, C] as the weight was reshaped, scale and minimum float32 that fit them."""
        codes = tensors.read(f"{self.name}.{CODES}")
        if self.bits == 4:
            codes = torch.cat([codes >> 4, codes & 15])
        scale = read_scales(f"{self.name}.scale", tensors).float()
        return codes, scale, -read_scales(f"{self.name}.zero", tensors).float() * scale


@dataclass(frozen=True)
class HqqReader:
    """Layers that have a ``W_q``, whatever a configuration says: they describe themselves."""

    where: str
    format: str = "hqq"
    weights: tuple[str, ...] = (CODES,)

    def quantizes(self, layer: str) -> bool:
        return False

    def is_quantized(self, layer: str, tensors: SafetensorsFolder) -> bool:
        return f"{layer}.{CODES}" in tensors

    def inspect(
        self, name: str, shape: tuple[int, int], tensors: SafetensorsFolder, contradictions: Contradictions
    ) -> StoredLayer:
        require(name, tensors, "scale", "zero", *_SETTINGS)
        bits, group_size, axis = (_setting(name, key, tensors) for key in _SETTINGS)
        for flag in _FLAGS:
            if f"{name}.{flag}" in tensors and _setting(name, flag, tensors):
                raise _impossible(name, flag, 1, "0: scales and zero points as floats")
        if bits not in READABLE_BITS:
            return HqqLayer(name=name, shape=shape, bits=bits)
        if f"{name}.shape" in tensors and tuple(tensors.read(f"{name}.shape").tolist()) != shape:
            found = tensors.read(f"{name}.shape").tolist()
            raise _impossible(name, "shape", found, f"{list(shape)}, as in the model")
        count = shape[0] * shape[1]
        if group_size < 1 or count % group_size or axis not in (0, 1):
            raise _impossible(name, "group_size", (group_size, axis), f"a divisor of {count}, axis 0 or 1")
        groups = count // group_size
        rows, columns = (groups, group_size) if axis else (group_size, groups)
        if bits == 4 and rows % 2:
            raise _impossible(name, "group_size", group_size, "an even number of rows of the reshaped weight")
        check(name, CODES, tensors, (rows // 2 if bits == 4 else rows, columns), (torch.uint8,))
        for part in ("scale", "zero"):
            check(name, part, tensors, (groups, 1) if axis else (1, groups), _FLOATS)
        return HqqLayer(name=name, shape=shape, bits=bits, group_size=group_size, axis=axis)


def open_hqq(folder: ModelFolder) -> QuantizedFolder:
    """A folder whose layers have a ``W_q``; hqq itself writes no configuration."""
    where = folder.quantization.where if folder.quantization is not None else folder.path.name
    return open_quantized(folder, HqqReader(where))


def _setting(name: str, key: str, tensors: SafetensorsFolder) -> int:
    stored = tensors[f"{name}.{key}"]
    if stored.shape not in ((), (1,)) or stored.dtype.is_floating_point:
        raise _impossible(name, key, f"{stored.dtype} {list(stored.shape)}", "one integer")
    return int(stored.read().reshape(()))


def _impossible(layer: str, key: str, found: object, accepted: str) -> CheckpointError:
    return CheckpointError(
        f"{key} is impossible", where=f"{layer}.{key}", found=str(found)[:200], accepted=accepted
    )
