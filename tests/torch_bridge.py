"""numpy arrays (bfloat16 by ml_dtypes) to torch tensors and back, and the operator called with a twin's weight."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch
from numpy_twin import Array, Weight

import halfbyte.passes.ops  # noqa: F401  registers torch.ops.halfbyte
from halfbyte.passes.program import LayerSource
from halfbyte.passes.weight import QuantTensor


def tensor(array: Array | None) -> torch.Tensor | None:
    if array is None:
        return None
    array = np.array(array)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def array(value: torch.Tensor) -> Array:
    value = value.detach().contiguous()
    if value.dtype is torch.bfloat16:
        return value.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return value.numpy()


def nibbles(codes: Array) -> Array:
    """uint8 [N, ceil(K / 2)]: input 2j in the low half of byte j, input 2j + 1 in the high half."""
    out = np.zeros((codes.shape[0], (codes.shape[1] + 1) // 2), np.uint8)
    for k in range(codes.shape[1]):
        out[:, k // 2] += codes[:, k] << (4 * (k % 2))
    return out


def linear_arguments(
    x: Array, weight: Weight, activations: str, digits: int = 3, min_tokens: int = 0
) -> tuple[object, ...]:
    """The arguments of torch.ops.halfbyte.linear."""
    codes = nibbles(weight.codes) if weight.bits == 4 else weight.codes
    parts = (x, codes, weight.scale, weight.zero, weight.minimum, weight.bias)
    return (*map(tensor, parts), weight.bits, weight.group_size, activations, digits, min_tokens)


def operator_linear(
    x: Array, weight: Weight, activations: str, digits: int = 3, min_tokens: int = 0
) -> Array:
    """torch.ops.halfbyte.linear on numpy arrays."""
    return array(torch.ops.halfbyte.linear(*linear_arguments(x, weight, activations, digits, min_tokens)))


def quant_tensor(name: str, weight: Weight) -> QuantTensor:
    """The product's weight object (without the bias)."""
    codes, scale = tensor(weight.codes), tensor(weight.scale)
    assert codes is not None and scale is not None
    return QuantTensor(
        name, codes, scale, weight.group_size, tensor(weight.zero), tensor(weight.minimum), bits=weight.bits
    )


def layer_source(name: str, weight: Weight) -> LayerSource:
    """The product's source of a weight and its bias."""
    whole, bias = quant_tensor(name, weight), tensor(weight.bias)
    return LayerSource(lambda: whole, None if bias is None else (lambda: bias), (name,))
