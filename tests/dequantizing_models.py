"""Linears as people's own graphs hold them: packed words, shifts, masks, and a float matrix product at the end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy_twin import Array, Weight
from torch_bridge import tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
SPELLINGS = ("matmul", "mm", "addmm", "linear")


def packed(values: Array, order: tuple[int, ...] = tuple(range(8))) -> Array:
    """[R, C] of 0..15 -> uint32 [R, C / 8], value order[i] of eight in nibble i."""
    parts = values.astype(np.uint64).reshape(len(values), -1, 8)
    return sum(parts[:, :, source] << np.uint64(4 * place) for place, source in enumerate(order)).astype(
        np.uint32
    )


class Dequantizing(torch.nn.Module):
    """What the models share: buffers from numpy, and the ways to spell x @ W + bias for W [K, N]."""

    def __init__(self, bias: Array | None, spelling: str) -> None:
        super().__init__()
        self.spelling = spelling
        self.keep("bias", bias)

    def keep(self, name: str, value: Array | None) -> None:
        self.register_buffer(name, tensor(value))

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if self.spelling == "linear":
            return torch.nn.functional.linear(x, weight.t(), bias)
        if self.spelling == "addmm" and bias is not None:
            return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], -1)
        y = torch.mm(x, weight) if self.spelling == "mm" else torch.matmul(x, weight)
        return y if bias is None else y + bias


class GptqLinear(Dequantizing):
    """GPTQ: qweight [K / 8, N], qzeros [G, N / 8] (stored one less in version 1), scales [G, N], g_idx [K].

    Args:
        weight: groups in the order of the inputs, or of ``order``.
        order: the inputs in the order of the groups (activation order).
        words: torch dtype of the packed words.
    """

    def __init__(
        self,
        weight: Weight,
        *,
        version: int = 1,
        order: Array | None = None,
        words: torch.dtype = torch.int32,
        spelling: str = "matmul",
        compute: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(weight.bias, spelling)
        inputs = weight.codes.shape[1]
        self.version, self.compute = version, compute
        places = np.arange(inputs) if order is None else order
        codes, group = np.empty_like(weight.codes.T), np.empty(inputs, np.int32)
        codes[places] = weight.codes.T
        group[places] = np.arange(inputs) // weight.group_size
        zero = np.full(weight.scale.shape, 8) if weight.zero is None else weight.zero
        zero = (zero.astype(np.int64) - (version == 1)) % 16
        self.keep("qweight", packed(codes.T).T.view(np.int32))
        self.keep("qzeros", packed(zero.T).view(np.int32))
        self.qweight, self.qzeros = self.qweight.to(words), self.qzeros.to(words)
        self.keep("scales", np.ascontiguousarray(weight.scale.T))
        self.keep("g_idx", group)
        self.register_buffer("shifts", torch.arange(0, 32, 4, dtype=words), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inputs, outputs = self.qweight.shape[0] * 8, self.qweight.shape[1]
        codes = (self.qweight[:, None, :] >> self.shifts[None, :, None]) & 15
        codes = codes.reshape(inputs, outputs)
        zero = (self.qzeros[:, :, None] >> self.shifts[None, None, :]) & 15
        zero = zero.reshape(-1, outputs)
        if self.version == 1:
            zero = (zero + 1) & 15
        group = self.g_idx.long()
        scales = self.scales.to(self.compute)
        weight = scales[group] * (codes - zero[group]).to(self.compute)
        return self.product(x, weight.to(x.dtype))


class AwqLinear(Dequantizing):
    """AWQ: qweight [K, N / 8] and qzeros [G, N / 8] interleaved the same way, scales [G, N]."""

    def __init__(self, weight: Weight, spelling: str = "matmul") -> None:
        super().__init__(weight.bias, spelling)
        assert weight.zero is not None
        self.group_size = weight.group_size
        self.keep("qweight", packed(weight.codes.T, AWQ_ORDER).view(np.int32))
        self.keep("qzeros", packed(weight.zero.T, AWQ_ORDER).view(np.int32))
        self.keep("scales", np.ascontiguousarray(weight.scale.T))
        self.register_buffer("shifts", torch.arange(0, 32, 4, dtype=torch.int32), persistent=False)
        back = torch.tensor([AWQ_ORDER.index(place) for place in range(8)])
        self.register_buffer("back", back, persistent=False)

    def unpack(self, words: torch.Tensor) -> torch.Tensor:
        values = (words[:, :, None] >> self.shifts) & 15
        return values[:, :, self.back].reshape(words.shape[0], -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes, zero = self.unpack(self.qweight), self.unpack(self.qzeros)
        group = torch.arange(codes.shape[0]) // self.group_size
        weight = (codes - zero[group]) * self.scales[group]
        return self.product(x, weight.to(x.dtype))


class GroupedLinear(Dequantizing):
    """Weights [N, K] that are cut into [N, G, g]: scale * (codes - zero), or codes * scale + minimum."""

    def __init__(self, weight: Weight, *, signed: bool = False, spelling: str = "linear") -> None:
        super().__init__(weight.bias, spelling)
        self.size = weight.group_size
        codes = (weight.codes.astype(np.int16) - weight.middle).astype(np.int8) if signed else weight.codes
        self.keep("codes", codes.astype(np.int8) if signed else codes)
        for name in ("scale", "zero", "minimum"):
            values = getattr(weight, name)
            self.keep(name, None if values is None else values[:, :, None])
        if weight.zero is None and weight.minimum is None and not signed:
            self.keep("zero", np.full((*weight.scale.shape, 1), weight.middle, np.uint8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs, inputs = self.codes.shape
        codes = self.codes.reshape(outputs, -1, self.size).to(self.scale.dtype)
        if self.zero is not None:
            codes = codes - self.zero.to(codes.dtype)
        weight = codes * self.scale
        if self.minimum is not None:
            weight = weight + self.minimum
        return self.product(x, weight.reshape(outputs, inputs).to(x.dtype).t())


def in_input_order(weight: Weight, order: Array | None) -> Array:
    """float64 [N, K]: the weight a model with this activation order computes with."""
    plain = weight.dequantized()
    if order is None:
        return plain
    out = np.empty_like(plain)
    out[:, order] = plain
    return out


def exact_output(x: Array, weight: Weight, order: Array | None = None) -> Array:
    """float64 [..., N]."""
    bias = 0 if weight.bias is None else weight.bias.astype(np.float64)
    return x.astype(np.float64) @ in_input_order(weight, order).T + bias


def without_bias(weight: Weight) -> Weight:
    return replace(weight, bias=None)
