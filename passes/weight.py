"""The one weight object: what every checkpoint reader gives and every packer takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from halfbyte.passes.levels import Levels
from halfbyte.passes.scheme import Fp8Scheme, WeightScheme, Zero
from halfbyte.passes.words import CodeWords, loose

FLOAT_DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
_DTYPE_NAMES = {dtype: name for name, dtype in FLOAT_DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """``f16``, ``bf16``, ``f32``, or torch's own name of any other dtype."""
    return _DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(frozen=True)
class QuantTensor:
    """An integer weight ``W[n, k] = scale[n, g(k)] * (u[n, k] - zero[n, g(k)])`` or ``u * scale + minimum``,
    or ``scale[n, g(k)] * level[u[n, k]]`` where codes stand for the entries of a table.

    Groups are contiguous: ``g(k) = k // group_size``. A checkpoint with activation order has had its rows
    sorted by group; ``permutation`` then says which input goes where: the layer computes with ``x[..., permutation]``.

    Attributes:
        name: module path of the layer.
        stored: the codes, values 0..15, or 0..255 where ``bits`` is 8: uint8 [N, K], or as a file's words have them.
        scale: float16, bfloat16 or float32 [N, G], G = ceil(K / group_size), as stored; may be negative.
        group_size: inputs per group; K when channelwise.
        zero: uint8 [N, G] zero points in the range of the codes, or None (then 8 or 128, unless ``minimum`` is given).
        minimum: float [N, G] of the dtype of ``scale``, or None. GGUF Q4_1's ``m``.
        permutation: int64 [K] or None.
        bits: 4 or 8.
        levels: what codes stand for; with a table there are neither zero points nor minima.
    """

    name: str
    stored: torch.Tensor | CodeWords
    scale: torch.Tensor
    group_size: int
    zero: torch.Tensor | None = None
    minimum: torch.Tensor | None = None
    permutation: torch.Tensor | None = None
    bits: int = 4
    levels: Levels = Levels.INTEGERS

    def __post_init__(self) -> None:
        n, k = self.shape
        groups = -(-k // self.group_size) if self.group_size > 0 else -1
        if isinstance(self.stored, CodeWords):
            if self.stored.bits != self.bits:
                raise ValueError(f"{self.name}: words of {self.stored.bits} bits, wanted {self.bits}")
        elif self.stored.dtype != torch.uint8:
            raise TypeError(f"{self.name}: codes {self.stored.dtype}")
        if self.scale.dtype not in _DTYPE_NAMES:
            raise TypeError(f"{self.name}: scale {self.scale.dtype}")
        for label, part in (("scale", self.scale), ("zero", self.zero), ("minimum", self.minimum)):
            if part is not None and tuple(part.shape) != (n, groups):
                raise ValueError(f"{self.name}: {label} has shape {list(part.shape)}, wanted {[n, groups]}")
        if self.zero is not None and (self.minimum is not None or self.zero.dtype != torch.uint8):
            raise TypeError(f"{self.name}: zero must be uint8 and excludes minimum")
        if self.minimum is not None and self.minimum.dtype != self.scale.dtype:
            raise TypeError(f"{self.name}: minimum {self.minimum.dtype} beside scale {self.scale.dtype}")
        if self.levels.table and (self.bits != 4 or self.zero is not None or self.minimum is not None):
            raise ValueError(
                f"{self.name}: {self.levels.value} takes codes of 4 bits and no zero points or minima"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Logical (N, K) = (outputs, inputs)."""
        return self.stored.shape[0], self.stored.shape[1]

    @property
    def codes(self) -> torch.Tensor:
        """uint8 [N, K]; taken out of the words at every access."""
        return loose(self.stored)

    @property
    def scheme(self) -> WeightScheme:
        zero = (
            Zero.MINIMUM
            if self.minimum is not None
            else Zero.INTEGER
            if self.zero is not None
            else Zero.SYMMETRIC
        )
        return WeightScheme(
            self.group_size,
            self.scale.shape[1] == 1,
            zero,
            dtype_name(self.scale.dtype),
            self.permutation is not None,
            self.bits,
            self.levels,
        )

    def rows(self, start: int, end: int) -> QuantTensor:
        """The outputs from ``start`` to before ``end``."""
        part = slice(start, end)
        zero, minimum = (None if value is None else value[part] for value in (self.zero, self.minimum))
        return replace(self, stored=self.codes[part], scale=self.scale[part], zero=zero, minimum=minimum)

    def packed(self) -> torch.Tensor:
        """The form ``halfbyte::linear`` takes: uint8 [N, ceil(K / 2)], low nibble = even k; [N, K] for 8 bits."""
        return pack_nibbles(self.codes) if self.bits == 4 else self.codes

    def tensors(self) -> dict[str, torch.Tensor | None]:
        """What ``halfbyte::linear`` takes of it, in that order, by the names that a program's state has for it."""
        return {"codes": self.packed(), "scale": self.scale, "zero": self.zero, "minimum": self.minimum}

    def same_values(self, other: Weight) -> bool:
        """Whether the other weight differs in nothing but its name."""
        if not isinstance(other, QuantTensor):
            return False
        parts = ("codes", "scale", "zero", "minimum", "permutation")
        equal = all(same(getattr(self, part), getattr(other, part)) for part in parts)
        settings = ((one.group_size, one.bits, one.levels) for one in (self, other))
        return equal and len(set(settings)) == 1

    def integers(self) -> torch.Tensor:
        """int8 [N, K]: what the scales of a symmetric weight multiply."""
        if self.levels.table:
            return self.levels.of(self.codes)
        return (self.codes.to(torch.int16) - (1 << (self.bits - 1))).to(torch.int8)

    def dequantize(self) -> torch.Tensor:
        """float32 [N, K] in the layer's own input order, one rounding per operation (as the formats define it)."""
        (outputs, inputs), groups = self.shape, self.scale.shape[1]
        symmetric = self.zero is None and self.minimum is None
        whole = self.integers() if symmetric else self.codes
        padded = torch.nn.functional.pad(whole, (0, groups * self.group_size - inputs))
        weight = padded.float().reshape(outputs, groups, -1)
        if self.zero is not None:
            weight.sub_(self.zero.float()[..., None])
        weight.mul_(self.scale.float()[..., None])
        if self.minimum is not None:
            weight.add_(self.minimum.float()[..., None])
        weight = weight.reshape(outputs, -1)[:, :inputs].contiguous()
        if self.permutation is None:
            return weight
        out = torch.empty_like(weight)
        out[:, self.permutation] = weight
        return out


def quant_tensor(
    name: str,
    parts: Sequence[torch.Tensor | None],
    inputs: int,
    group_size: int,
    bits: int,
    levels: Levels = Levels.INTEGERS,
) -> QuantTensor:
    """A `QuantTensor` from the tensors that ``halfbyte::linear`` takes: codes, scale, zero, minimum."""
    codes, scale, zero, minimum = parts
    assert codes is not None and scale is not None
    loose = unpack_nibbles(codes, inputs) if bits == 4 else codes
    return QuantTensor(name, loose, scale, group_size, zero, minimum, bits=bits, levels=levels)


@dataclass(frozen=True)
class Fp8Tensor:
    """An e4m3 weight ``W[n, k] = e4m3(bits[n, k]) * scale[n // block_outputs, k // block_inputs]``.

    Attributes:
        name: module path of the layer.
        bits: uint8 [N, K]; no NaN (0x7f, 0xff).
        scale: float [ceil(N / block_outputs), ceil(K / block_inputs)].
        block_outputs: outputs that share a scale; N for one scale per column of blocks.
        block_inputs: inputs that share a scale; K for scales that span a row.
    """

    name: str
    bits: torch.Tensor
    scale: torch.Tensor
    block_outputs: int
    block_inputs: int

    def __post_init__(self) -> None:
        n, k = self.bits.shape
        wanted = (-(-n // self.block_outputs), -(-k // self.block_inputs))
        if tuple(self.scale.shape) != wanted:
            raise ValueError(f"{self.name}: scale has shape {list(self.scale.shape)}, wanted {list(wanted)}")
        if bool(((self.bits & 127) == 127).any()):
            raise ValueError(f"{self.name}: the weight holds NaN")

    @property
    def shape(self) -> tuple[int, int]:
        """Logical (N, K) = (outputs, inputs)."""
        return self.bits.shape[0], self.bits.shape[1]

    @property
    def scheme(self) -> Fp8Scheme:
        return Fp8Scheme(self.block_outputs, self.block_inputs, dtype_name(self.scale.dtype))

    def rows(self, start: int, end: int) -> Fp8Tensor:
        """The outputs from ``start`` to before ``end``, each with scales of its own."""
        scale = scales_by_row(self.scale, self.shape[0], self.block_outputs)[start:end]
        return replace(self, bits=self.bits[start:end], scale=scale, block_outputs=1)

    def tensors(self) -> dict[str, torch.Tensor | None]:
        """What ``halfbyte::fp8_block_linear`` takes of it, in that order."""
        return {"codes": self.bits, "scale": self.scale}

    def same_values(self, other: Weight) -> bool:
        """Whether the other weight differs in nothing but its name."""
        if not isinstance(other, Fp8Tensor):
            return False
        blocks = (self.block_outputs, self.block_inputs) == (other.block_outputs, other.block_inputs)
        return blocks and same(self.bits, other.bits) and same(self.scale, other.scale)

    def dequantize(self) -> torch.Tensor:
        """float32 [N, K], one rounding per weight."""
        columns = self.row_scales()
        block = torch.arange(self.shape[1]) // self.block_inputs
        return self.bits.view(torch.float8_e4m3fn).float() * columns[:, block]

    def row_scales(self) -> torch.Tensor:
        """float32 [N, ceil(K / block_inputs)]: the scales of every output."""
        return scales_by_row(self.scale, self.shape[0], self.block_outputs).float()


Weight = QuantTensor | Fp8Tensor


def scales_by_row(scale: torch.Tensor, outputs: int, block_outputs: int) -> torch.Tensor:
    """[ceil(N / block_outputs), B] -> [N, B]."""
    return scale.repeat_interleave(block_outputs, 0)[:outputs]


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two tensors have equal values and dtypes, or neither is there."""
    if one is None or other is None:
        return one is other
    return one.dtype is other.dtype and torch.equal(one, other)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K] values 0..15 -> uint8 [N, ceil(K / 2)], low nibble = even k, zero padding at an odd end."""
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_nibbles(nibbles: torch.Tensor, columns: int) -> torch.Tensor:
    """The inverse of `pack_nibbles`: uint8 [N, ceil(columns / 2)] -> uint8 [N, columns]."""
    return torch.stack([nibbles & 15, nibbles >> 4], -1).reshape(nibbles.shape[0], -1)[:, :columns]
