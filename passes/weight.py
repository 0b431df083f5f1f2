"""The one weight object: what every checkpoint reader gives and every packer takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halfbyte.passes.scheme import WeightScheme, Zero

_DTYPE_NAMES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}


def dtype_name(dtype: torch.dtype) -> str:
    """``f16``, ``bf16``, ``f32``, or torch's own name of any other dtype."""
    return _DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(frozen=True)
class QuantTensor:
    """An int4 weight ``W[n, k] = scale[n, g(k)] * (u[n, k] - zero[n, g(k)])`` or ``u * scale + minimum``.

    Groups are contiguous: ``g(k) = k // group_size``. A checkpoint with activation order has had its rows
    sorted by group; ``permutation`` then says which input goes where: the layer computes with ``x[..., permutation]``.

    Attributes:
        name: module path of the layer.
        codes: uint8 [N, K], values 0..15.
        scale: float16, bfloat16 or float32 [N, G], G = ceil(K / group_size), as stored; may be negative.
        group_size: inputs per group; K when channelwise.
        zero: uint8 [N, G] zero points 0..15, or None (then 8, unless ``minimum`` is given).
        minimum: float [N, G] of the dtype of ``scale``, or None. GGUF Q4_1's ``m``.
        permutation: int64 [K] or None.
    """

    name: str
    codes: torch.Tensor
    scale: torch.Tensor
    group_size: int
    zero: torch.Tensor | None = None
    minimum: torch.Tensor | None = None
    permutation: torch.Tensor | None = None

    def __post_init__(self) -> None:
        n, k = self.codes.shape
        groups = -(-k // self.group_size) if self.group_size > 0 else -1
        if self.codes.dtype != torch.uint8 or self.scale.dtype not in _DTYPE_NAMES:
            raise TypeError(f"{self.name}: codes {self.codes.dtype}, scale {self.scale.dtype}")
        for label, part in (("scale", self.scale), ("zero", self.zero), ("minimum", self.minimum)):
            if part is not None and tuple(part.shape) != (n, groups):
                raise ValueError(f"{self.name}: {label} has shape {list(part.shape)}, wanted {[n, groups]}")
        if self.zero is not None and (self.minimum is not None or self.zero.dtype != torch.uint8):
            raise TypeError(f"{self.name}: zero must be uint8 and excludes minimum")
        if self.minimum is not None and self.minimum.dtype != self.scale.dtype:
            raise TypeError(f"{self.name}: minimum {self.minimum.dtype} beside scale {self.scale.dtype}")

    @property
    def shape(self) -> tuple[int, int]:
        """Logical (N, K) = (outputs, inputs)."""
        return self.codes.shape[0], self.codes.shape[1]

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
        )

    def same_values(self, other: QuantTensor) -> bool:
        """Whether the other weight differs in nothing but its name."""
        parts = ("codes", "scale", "zero", "minimum", "permutation")
        equal = all(same(getattr(self, part), getattr(other, part)) for part in parts)
        return equal and self.group_size == other.group_size

    def nibbles(self) -> torch.Tensor:
        """uint8 [N, ceil(K / 2)]: low nibble = even k. The form ``halfbyte::linear`` takes."""
        return pack_nibbles(self.codes)

    def dequantize(self) -> torch.Tensor:
        """float32 [N, K] in the layer's own input order, one rounding per operation (as the formats define it)."""
        group = torch.arange(self.shape[1]) // self.group_size
        scale = self.scale.float()[:, group]
        if self.minimum is not None:
            weight = self.codes.float() * scale + self.minimum.float()[:, group]
        else:
            zero = torch.tensor(8.0) if self.zero is None else self.zero.float()[:, group]
            weight = (self.codes.float() - zero) * scale
        if self.permutation is None:
            return weight
        out = torch.empty_like(weight)
        out[:, self.permutation] = weight
        return out


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
