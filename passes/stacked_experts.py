"""The weights of experts as ``halfbyte::moe`` and ``halfbyte::fp8_block_moe`` take them, and as single linears."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from halfbyte.passes.levels import Levels
from halfbyte.passes.program import ExpertsSource, LayerSource
from halfbyte.passes.weight import Fp8Tensor, quant_tensor

Parts = Sequence[torch.Tensor | None]


def stacked_source(
    name: str,
    up: Parts,
    down: Parts,
    inputs: tuple[int, int],
    groups: tuple[int, int],
    bits: int,
    levels: Levels = Levels.INTEGERS,
) -> ExpertsSource:
    """The experts behind the tensors that ``halfbyte::moe`` takes.

    Args:
        name: of the experts.
        up, down: codes, scale, zero, minimum, bias, [E, outputs, ...] each, or None; gate's outputs before up's.
        inputs, groups: of up and of down.
        bits: of the codes.
        levels: what they stand for.

    Raises:
        ValueError: tensors whose shapes do not fit each other.
    """

    def part(own: Parts, side: int) -> LayerSource:
        bias = own[4]
        weight = quant_tensor(name, own[:4], inputs[side], groups[side], bits, levels)
        return LayerSource(lambda: weight, None if bias is None else (lambda: bias), (name,))

    return _source(up, down, part)


def fp8_stacked_source(
    name: str, up: Parts, down: Parts, blocks: tuple[tuple[int, int], tuple[int, int]]
) -> ExpertsSource:
    """The experts behind the tensors that ``halfbyte::fp8_block_moe`` takes.

    Args:
        name: of the experts.
        up, down: codes, scale, bias of all experts each, bias or None; gate's outputs before up's.
        blocks: of up and of down, outputs and inputs that share a scale.

    Raises:
        ValueError: tensors whose shapes do not fit each other, or NaN among the weights.
    """

    def part(own: Parts, side: int) -> LayerSource:
        codes, scale, bias = own
        assert codes is not None and scale is not None
        weight = Fp8Tensor(name, codes, scale, *blocks[side])
        return LayerSource(lambda: weight, None if bias is None else (lambda: bias), (name,))

    return _source(up, down, part)


def _source(up: Parts, down: Parts, part: Callable[[Parts, int], LayerSource]) -> ExpertsSource:
    def half(expert: int, which: int) -> Parts:
        return [None if value is None else value[expert].chunk(2)[which] for value in up]

    assert up[0] is not None
    return ExpertsSource(
        up[0].shape[0],
        lambda expert: part(half(expert, 0), 0),
        lambda expert: part(half(expert, 1), 0),
        lambda expert: part([None if value is None else value[expert] for value in down], 1),
    )


def stacked_parts(source: ExpertsSource) -> tuple[Parts, Parts]:
    """The inverse: the tensors of up (gate's outputs before up's) and of down that the operators take."""
    return _stacked(source.experts, source.gate, source.up), _stacked(source.experts, source.down)


def _stacked(experts: int, *linears: Callable[[int], LayerSource]) -> Parts:
    rows = []
    for expert in range(experts):
        parts = [_parts(linear(expert)) for linear in linears]
        rows.append([_joined(column) for column in zip(*parts, strict=True)])
    return [None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True)]


def _parts(source: LayerSource) -> Parts:
    weight, bias = source.weight(), None if source.bias is None else source.bias().float()
    if isinstance(weight, Fp8Tensor):
        return (weight.bits, weight.scale, bias)
    return (weight.packed(), weight.scale, weight.zero, weight.minimum, bias)


def _joined(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    return None if parts[0] is None else torch.cat([part for part in parts if part is not None])
