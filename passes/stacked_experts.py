"""The weights of experts as ``halfbyte::moe`` takes them, stacked, and as single linears."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from halfbyte.passes.program import ExpertsSource, LayerSource, integer_weight
from halfbyte.passes.weight import quant_tensor

Parts = Sequence[torch.Tensor | None]


def stacked_source(
    name: str, up: Parts, down: Parts, inputs: tuple[int, int], groups: tuple[int, int], bits: int
) -> ExpertsSource:
    """The experts behind the tensors that ``halfbyte::moe`` takes.

    Args:
        name: of the experts.
        up, down: codes, scale, zero, minimum, bias, [E, outputs, ...] each, or None; gate's outputs before up's.
        inputs, groups: of up and of down.
        bits: of the codes.

    Raises:
        ValueError: tensors whose shapes do not fit each other.
    """

    def part(expert: int, parts: Parts, rows: slice, side: int) -> LayerSource:
        own = [None if value is None else value[expert, rows] for value in parts]
        bias = own[4]
        weight = quant_tensor(name, own[:4], inputs[side], groups[side], bits)
        return LayerSource(lambda: weight, None if bias is None else (lambda: bias), (name,))

    assert up[0] is not None
    inner = up[0].shape[1] // 2
    return ExpertsSource(
        up[0].shape[0],
        lambda expert: part(expert, up, slice(0, inner), 0),
        lambda expert: part(expert, up, slice(inner, None), 0),
        lambda expert: part(expert, down, slice(None), 1),
    )


def stacked_parts(source: ExpertsSource) -> tuple[Parts, Parts]:
    """The inverse: the tensors of up (gate's outputs before up's) and of down that ``halfbyte::moe`` takes."""
    return _stacked(source.experts, source.gate, source.up), _stacked(source.experts, source.down)


def _stacked(experts: int, *linears: Callable[[int], LayerSource]) -> Parts:
    rows = []
    for expert in range(experts):
        parts = [_parts(linear(expert)) for linear in linears]
        rows.append([_joined(column) for column in zip(*parts, strict=True)])
    return [None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True)]


def _parts(source: LayerSource) -> Parts:
    weight, bias = integer_weight(source), None if source.bias is None else source.bias().float()
    return (weight.packed(), weight.scale, weight.zero, weight.minimum, bias)


def _joined(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    return None if parts[0] is None else torch.cat([part for part in parts if part is not None])
