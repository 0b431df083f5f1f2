"""numpy arrays (bfloat16 by ml_dtypes) to torch tensors and back, and the operator called with a twin's weight."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch
from moe_twin import Experts
from numpy_twin import Array, Weight

import halfbyte.passes.ops  # noqa: F401  registers torch.ops.halfbyte
from halfbyte.passes.levels import Levels
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
    settings = (weight.bits, weight.group_size, activations, digits, min_tokens, weight.levels)
    return (*map(tensor, parts), *settings)


def operator_linear(
    x: Array, weight: Weight, activations: str, digits: int = 3, min_tokens: int = 0
) -> Array:
    """torch.ops.halfbyte.linear on numpy arrays."""
    return array(torch.ops.halfbyte.linear(*linear_arguments(x, weight, activations, digits, min_tokens)))


def quant_tensor(name: str, weight: Weight) -> QuantTensor:
    """The product's weight object (without the bias)."""
    codes, scale = tensor(weight.codes), tensor(weight.scale)
    assert codes is not None and scale is not None
    parts = (codes, scale, weight.group_size, tensor(weight.zero), tensor(weight.minimum))
    return QuantTensor(name, *parts, bits=weight.bits, levels=Levels(weight.levels))


def layer_source(name: str, weight: Weight) -> LayerSource:
    """The product's source of a weight and its bias."""
    whole, bias = quant_tensor(name, weight), tensor(weight.bias)
    return LayerSource(lambda: whole, None if bias is None else (lambda: bias), (name,))


def stacked(weights: list[Weight], others: list[Weight] | None = None) -> list[torch.Tensor | None]:
    """codes, scale, zero, minimum, bias of all experts, the outputs of ``others`` below theirs."""

    def parts(weight: Weight) -> list[Array | None]:
        codes = nibbles(weight.codes) if weight.bits == 4 else weight.codes
        return [codes, weight.scale, weight.zero, weight.minimum, weight.bias]

    rows = []
    for index, weight in enumerate(weights):
        row = parts(weight)
        if others is not None:
            more = parts(others[index])
            row = [a if a is None else np.concatenate([a, b]) for a, b in zip(row, more, strict=True)]
        rows.append(row)
    return [tensor(None if column[0] is None else np.stack(column)) for column in zip(*rows, strict=True)]


def moe_arguments(experts: Experts, activations: str, digits: int) -> tuple[object, ...]:
    """Of torch.ops.halfbyte.moe, after x, ids and weights."""
    groups = (experts.gate[0].group_size, experts.down[0].group_size)
    glu, levels = (experts.glu, experts.limit), experts.gate[0].levels
    rest = (experts.gate[0].bits, *groups, activations, digits, *glu, levels)
    return (*stacked(experts.gate, experts.up), *stacked(experts.down), *rest)
