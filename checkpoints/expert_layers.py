"""From the linears of single experts, as checkpoints have them, to the experts of a block, computed as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from halfbyte.checkpoints.checkpoint import Checkpoint, LayerInfo
from halfbyte.checkpoints.experts import ExpertsShape
from halfbyte.errors import UnsupportedLayerError
from halfbyte.passes.ops.swiglu import swiglu
from halfbyte.passes.program import ExpertsSource, LayerSource
from halfbyte.passes.quant_experts import ExpertsScheme, QuantExperts
from halfbyte.passes.scheme import Activations, WeightScheme, Zero
from halfbyte.passes.weight import QuantTensor

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def quantized_experts(
    checkpoint: Checkpoint,
    path: str,
    module: torch.nn.Module,
    activations: Callable[[LayerInfo], Activations],
    digits: int,
) -> QuantExperts:
    """The module that computes the experts of transformers' ``module``.

    Args:
        checkpoint: an opened checkpoint.
        path: of the module in the model.
        module: transformers' module of stacked experts.
        activations: what a layer does to its input.
        digits: digit planes of float activations.

    Raises:
        UnsupportedLayerError: the experts are not all alike, not all quantized, or their product is no SwiGLU.
    """
    glu, limit = _product(path, module)
    shape = ExpertsShape.of(module)
    assert shape is not None
    experts = range(shape.experts)
    layers = {p: [_layer(checkpoint, path, expert, p) for expert in experts] for p in _PROJECTIONS}
    up = _common(path, [*layers["gate_proj"], *layers["up_proj"]])
    down = _common(path, layers["down_proj"])
    every = [layer for part in layers.values() for layer in part]
    chosen = {activations(layer) for layer in every}
    if len(chosen) > 1:
        kinds = ", ".join(sorted(kind.value for kind in chosen))
        raise _refused(path, f"activations {kinds}", "the same activations for all experts")
    if up.bits != down.bits:
        raise _refused(path, f"{up.bits} bits in gate and up, {down.bits} in down", "the same width")
    scheme = ExpertsScheme(up, down, shape.bias, glu, limit)
    linears = [checkpoint.name_of(f"{path}.{e}.{p}") for e in experts for p in _PROJECTIONS]
    widths = (shape.hidden, shape.inner)
    return QuantExperts(path, scheme, linears, *widths, activations=chosen.pop(), digits=digits)


def _product(path: str, module: Any) -> tuple[str, float]:
    """Kind and limit of the product of gate and up, by what the module does: transformers has many classes of it."""
    gate, up = torch.linspace(-20, 20, 41).repeat(5), torch.linspace(-9, 9, 5).repeat_interleave(41)
    if hasattr(module, "_apply_gate"):
        found = module._apply_gate(torch.stack([gate, up], -1))[:, 0]
    else:
        found = module.act_fn(gate) * up
    limit = float(getattr(module, "limit", None) or 0)
    for kind in ("silu", "oai"):
        if torch.allclose(found, swiglu(gate, up, kind, limit), rtol=1e-4, atol=1e-4):
            return kind, limit if kind == "oai" else 0.0
    activation = type(getattr(module, "act_fn", module)).__name__
    raise _refused(path, f"the activation {activation}", "SiLU, or the clamped product of gpt-oss")


def experts_source(checkpoint: Checkpoint, linears: Sequence[str], up: Zero, down: Zero) -> ExpertsSource:
    """Where the weights of a block's experts come from, expert by expert.

    Args:
        checkpoint: an opened checkpoint.
        linears: gate, up and down of every expert, by their names in the checkpoint.
        up, down: the kind of zero points that the block has.
    """

    def source(place: int, zero: Zero) -> Callable[[int], LayerSource]:
        def of(expert: int) -> LayerSource:
            name = linears[len(_PROJECTIONS) * expert + place]
            bias = (lambda: checkpoint.float_tensor(f"{name}.bias")) if checkpoint.layers[name].bias else None
            return LayerSource(lambda: _like(zero, checkpoint.quantized(name)), bias, (name,))

        return of

    count = len(linears) // len(_PROJECTIONS)
    return ExpertsSource(count, source(0, up), source(1, up), source(2, down))


def _layer(checkpoint: Checkpoint, path: str, expert: int, projection: str) -> LayerInfo:
    return checkpoint.layers[checkpoint.name_of(f"{path}.{expert}.{projection}")]


def _common(path: str, layers: Sequence[LayerInfo]) -> WeightScheme:
    """The scheme of all these layers; zero points that are all 8 are only a case of zero points."""
    kinds: dict[object, LayerInfo] = {}
    for layer in layers:
        scheme = layer.scheme
        if isinstance(scheme, WeightScheme) and scheme.zero is Zero.SYMMETRIC:
            scheme = replace(scheme, zero=Zero.INTEGER)
        kinds.setdefault(scheme, layer)
    first, *others = kinds.values()
    if others:
        found = f"{first.name}: {first.scheme or 'float'}; {others[0].name}: {others[0].scheme or 'float'}"
        raise _refused(path, found, "experts that are all quantized alike")
    if not isinstance(first.scheme, WeightScheme):
        raise _refused(path, str(first.scheme or "float weights"), "experts with int4 or int8 weights")
    if first.scheme.act_order:
        raise _refused(path, "activation order", "groups that are contiguous")
    zeros = {layer.scheme.zero for layer in layers if isinstance(layer.scheme, WeightScheme)}
    return first.scheme if len(zeros) == 1 else replace(first.scheme, zero=Zero.INTEGER)


def _like(zero: Zero, weight: object) -> QuantTensor:
    """A weight with its middle written out as zero points where other experts have zero points."""
    assert isinstance(weight, QuantTensor)
    if zero is not Zero.INTEGER or weight.zero is not None:
        return weight
    middle = torch.full(weight.scale.shape, 1 << (weight.bits - 1), dtype=torch.uint8)
    return replace(weight, zero=middle)


def _refused(path: str, found: str, accepted: str) -> UnsupportedLayerError:
    return UnsupportedLayerError(
        "these experts cannot be compiled as they are",
        where=path,
        found=found,
        accepted=accepted,
        advice="quantize the experts anew, all with one scheme",
    )
