"""From the linears of single experts, as checkpoints have them, to the experts of a block, computed as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from halfbyte.checkpoints.checkpoint import Checkpoint, LayerInfo
from halfbyte.checkpoints.experts import ExpertsShape
from halfbyte.errors import UnsupportedLayerError
from halfbyte.passes.fp8_experts import Fp8Experts, Fp8ExpertsScheme
from halfbyte.passes.mixed_experts import FloatExperts, MixedExperts, SingleExpert
from halfbyte.passes.ops.swiglu import swiglu
from halfbyte.passes.program import ExpertsSource, LayerSource
from halfbyte.passes.quant_experts import ExpertsScheme, QuantExperts
from halfbyte.passes.scheme import Activations, Fp8Scheme, Scheme, WeightScheme, Zero
from halfbyte.passes.weight import QuantTensor, Weight

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


# More in a block than are worth computing one by one, each on all tokens.
_MOST_SINGLE = 32


@dataclass(frozen=True)
class _Kind:
    """What experts that one kernel computes have in common."""

    up: Scheme
    down: Scheme
    activations: Activations


def experts_module(
    checkpoint: Checkpoint,
    path: str,
    module: torch.nn.Module,
    activations: Callable[[LayerInfo], Activations],
    digits: int,
    linear: Callable[[str], torch.nn.Module],
) -> torch.nn.Module:
    """The module that computes the experts of transformers' ``module``: one kernel where they are all alike.

    Args:
        checkpoint: an opened checkpoint.
        path: of the module in the model.
        module: transformers' module of stacked experts.
        activations: what a layer does to its input.
        digits: digit planes of float activations.
        linear: makes the module of a single linear, by its name in the model.

    Raises:
        UnsupportedLayerError: too many experts that are not alike, or a product that is no SwiGLU.
    """
    glu, limit = product_of(path, module)
    shape = ExpertsShape.of(module)
    assert shape is not None
    layers = [_layers(checkpoint, path, expert) for expert in range(shape.experts)]
    if all(layer.scheme is None for expert in layers for layer in expert):
        return float_experts(path, module)
    groups, single = _groups(layers, activations)
    if len(single) > _MOST_SINGLE:
        raise _too_many(path, layers, single[0])
    if len(groups) == 1 and not single:
        [(kind, _)] = groups
        return _alike(path, layers, kind, shape, (glu, limit), digits)
    alike: list[tuple[QuantExperts | Fp8Experts, list[int]]] = []
    for index, (kind, numbers) in enumerate(groups):
        own = [layers[number] for number in numbers]
        alike.append((_alike(f"{path}.alike{index}", own, kind, shape, (glu, limit), digits), numbers))
    made = {}
    for number in single:
        gate, up, down = (linear(f"{path}.{number}.{projection}") for projection in _PROJECTIONS)
        made[number] = SingleExpert(gate, up, down, glu, limit)
    return MixedExperts(shape.experts, alike, made)


def float_experts(path: str, module: torch.nn.Module) -> FloatExperts:
    """The module that computes transformers' ``module`` of experts in float, without loops that depend on data.

    Raises:
        UnsupportedLayerError: its product is no SwiGLU.
    """
    glu, limit = product_of(path, module)
    shape = ExpertsShape.of(module)
    assert shape is not None
    return FloatExperts(
        dict(module.named_parameters()),
        transposed=shape.transposed,
        interleaved=shape.interleaved,
        glu=glu,
        limit=limit,
    )


def quantized_experts(
    checkpoint: Checkpoint,
    path: str,
    module: torch.nn.Module,
    linears: Sequence[str],
    activations: Callable[[LayerInfo], Activations],
    digits: int,
) -> QuantExperts | Fp8Experts:
    """The module of those experts of transformers' ``module`` that one kernel computes.

    Args:
        linears: gate, up and down of every one of them, by their names in the checkpoint.
    """
    shape = ExpertsShape.of(module)
    assert shape is not None
    found = [checkpoint.layers[name] for name in linears]
    layers = [(found[at], found[at + 1], found[at + 2]) for at in range(0, len(found), len(_PROJECTIONS))]
    [(kind, _)], _ = _groups(layers, activations)
    return _alike(path, layers, kind, shape, product_of(path, module), digits)


_Linears = tuple[LayerInfo, LayerInfo, LayerInfo]  # of an expert: gate, up, down


def _layers(checkpoint: Checkpoint, path: str, expert: int) -> _Linears:
    gate, up, down = (checkpoint.layers[checkpoint.name_of(f"{path}.{expert}.{p}")] for p in _PROJECTIONS)
    return gate, up, down


def _alike(
    name: str,
    layers: Sequence[_Linears],
    kind: _Kind,
    shape: ExpertsShape,
    product: tuple[str, float],
    digits: int,
) -> QuantExperts | Fp8Experts:
    """Whether zero points are stored is settled here: those that are all 8 are only a case of zero points."""
    names = [layer.name for linears in layers for layer in linears]
    widths = (shape.hidden, shape.inner)
    if isinstance(kind.up, Fp8Scheme):
        assert isinstance(kind.down, Fp8Scheme)
        fp8 = Fp8ExpertsScheme(kind.up, kind.down, shape.bias, *product)
        return Fp8Experts(name, fp8, names, *widths, activations=kind.activations)
    assert isinstance(kind.down, WeightScheme)

    def with_zeros(scheme: WeightScheme, members: Iterable[LayerInfo]) -> WeightScheme:
        symmetric = all(
            isinstance(m.scheme, WeightScheme) and m.scheme.zero is Zero.SYMMETRIC for m in members
        )
        return replace(scheme, zero=Zero.SYMMETRIC) if symmetric else scheme

    up = with_zeros(kind.up, [layer for gate, up, _ in layers for layer in (gate, up)])
    down = with_zeros(kind.down, [down for _, _, down in layers])
    scheme = ExpertsScheme(up, down, shape.bias, *product)
    return QuantExperts(name, scheme, names, *widths, activations=kind.activations, digits=digits)


def _groups(
    layers: Sequence[_Linears], activations: Callable[[LayerInfo], Activations]
) -> tuple[list[tuple[_Kind, list[int]]], list[int]]:
    """Numbers of the experts that are alike, and of those that no kernel of experts computes."""
    groups: dict[_Kind, list[int]] = {}
    single = []
    for number, linears in enumerate(layers):
        kind = _kind(linears, activations)
        if kind is None:
            single.append(number)
        else:
            groups.setdefault(kind, []).append(number)
    return [*groups.items()], single


def _kind(linears: _Linears, activations: Callable[[LayerInfo], Activations]) -> _Kind | None:
    gate, up, down = (_with_zeros(layer.scheme) for layer in linears)
    chosen = {activations(layer) for layer in linears}
    if gate is None or down is None or gate != up or len(chosen) > 1:
        return None
    if isinstance(gate, WeightScheme) and isinstance(down, WeightScheme):
        same = (gate.bits, gate.levels) == (down.bits, down.levels)
        together = same and not gate.act_order and not down.act_order
    else:
        together = type(gate) is type(down)
    return _Kind(gate, down, chosen.pop()) if together else None


def _with_zeros(scheme: Scheme | None) -> Scheme | None:
    if isinstance(scheme, WeightScheme) and scheme.zero is Zero.SYMMETRIC:
        return replace(scheme, zero=Zero.INTEGER)
    return scheme


def _too_many(path: str, layers: Sequence[_Linears], first: int) -> UnsupportedLayerError:
    parts = ", ".join(f"{layer.name}: {layer.scheme or 'float'}" for layer in layers[first])
    accepted = "gate and up of one scheme, down of the same width and kind, no activation order"
    return _refused(path, parts, f"{accepted}; others in at most {_MOST_SINGLE} experts")


def product_of(path: str, module: Any) -> tuple[str, float]:
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


def experts_source(
    checkpoint: Checkpoint, linears: Sequence[str], up: Zero | None = None, down: Zero | None = None
) -> ExpertsSource:
    """Where the weights of a block's experts come from, expert by expert.

    Args:
        checkpoint: an opened checkpoint.
        linears: gate, up and down of every expert, by their names in the checkpoint.
        up, down: the kind of zero points that the block has; None for e4m3 weights.
    """

    def source(place: int, zero: Zero | None) -> Callable[[int], LayerSource]:
        def of(expert: int) -> LayerSource:
            name = linears[len(_PROJECTIONS) * expert + place]
            bias = (lambda: checkpoint.float_tensor(f"{name}.bias")) if checkpoint.layers[name].bias else None
            return LayerSource(lambda: _like(zero, checkpoint.quantized(name)), bias, (name,))

        return of

    count = len(linears) // len(_PROJECTIONS)
    return ExpertsSource(count, source(0, up), source(1, up), source(2, down))


def _like(zero: Zero | None, weight: Weight) -> Weight:
    """A weight with its middle written out as zero points where other experts have zero points."""
    if not isinstance(weight, QuantTensor) or zero is not Zero.INTEGER or weight.zero is not None:
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
