"""The packed layers of a bundle's archive, from its keys and what the checkpoint says of their members."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from halfbyte.errors import CheckpointError

if TYPE_CHECKING:
    from halfbyte.checkpoints import Checkpoint, LayerInfo
    from halfbyte.lowering.kernels.fp8_linear import Fp8Linear
    from halfbyte.lowering.kernels.fp8_moe import Fp8Moe
    from halfbyte.lowering.kernels.linear import Linear
    from halfbyte.lowering.kernels.moe import Moe
    from halfbyte.lowering.layer_program import ArchivedLayer
    from halfbyte.lowering.targets.target import Target
    from halfbyte.passes.scheme import WeightScheme
    from halfbyte.runtime import Bundle

_CODES = ".codes"


def archived_layers(
    bundle: Bundle, checkpoint: Checkpoint, model: Any, report: Mapping[str, Any]
) -> list[ArchivedLayer]:
    """Every packed layer: linears, merged ones as one, and the experts of a block as one.

    Args:
        bundle: loaded.
        checkpoint: it was compiled from.
        model: transformers' model, for the shapes of modules of experts.
        report: the bundle's report.json.

    Raises:
        CheckpointError: the bundle holds a layer that the checkpoint does not.
    """
    from halfbyte.lowering.layer_program import ArchivedLayer
    from halfbyte.lowering.targets.choice import target_of
    from halfbyte.runtime.program import choose_program

    out = []
    target = target_of(choose_program(bundle.device, bundle.manifest))
    dtype, options = bundle.manifest.model.dtype, report["options"]
    experts, merged = report.get("experts", {}), report["merged"]  # bundles of 0.1 know no experts
    for name in _names(bundle, experts):
        members = tuple(experts.get(name) or merged.get(name, [checkpoint.name_of(name)]))
        found = [checkpoint.layers.get(member) for member in members]
        known = [layer for layer in found if layer is not None and layer.scheme is not None]
        if len(known) < len(members):
            raise _unknown(name)
        if name in experts:
            moe = _experts_kernels(target, checkpoint, model, (name, members), dtype, options)
            out.append(ArchivedLayer(name, moe, members))
        else:
            kernels = _kernels(target, known, dtype, options)
            out.append(ArchivedLayer(name, kernels, members, _fixed(name, kernels)))
    return out


def block_of(name: str) -> str:
    """The module of experts that a layer of the archive belongs to: ``a.experts.alike0`` is part of ``a.experts``."""
    return re.sub(r"\.alike\d+$", "", name)


def _names(bundle: Bundle, experts: Mapping[str, Sequence[str]]) -> Iterator[str]:
    sides = {f"{name}.{side}": name for name in experts for side in ("up", "down")}
    keys = [key for archive in bundle.manifest.parameters for key in archive.tensors if key.endswith(_CODES)]
    yield from dict.fromkeys(sides.get(key.removesuffix(_CODES), key.removesuffix(_CODES)) for key in keys)


def _fixed(name: str, kernels: Linear | Fp8Linear) -> str | None:
    """Where the archive holds what a layer's input is rounded with: merged layers share that of their first."""
    from halfbyte.lowering.kernels.linear import Linear

    fixed = isinstance(kernels, Linear) and kernels.modes[0].fixed
    return f"{name.partition('+')[0]}.fixed" if fixed else None


def _unknown(name: str) -> CheckpointError:
    return CheckpointError(
        "the bundle holds a layer that the checkpoint does not",
        where=name,
        advice="verify against the checkpoint that the bundle was compiled from",
    )


def _kernels(
    target: Target, members: Sequence[LayerInfo], dtype: str, options: Mapping[str, Any]
) -> Linear | Fp8Linear:
    """The kernels that compute a layer merged from these members."""
    from halfbyte.layer_activations import LayerActivations
    from halfbyte.lowering.kernels.linear import Linear
    from halfbyte.lowering.layout import Packing
    from halfbyte.passes.scheme import Activations, Fp8Scheme

    first = members[0]
    inputs, scheme, activations = (
        first.shape[1],
        first.scheme,
        LayerActivations.of(options).choose(first),
    )
    outputs = sum(member.shape[0] for member in members)
    assert scheme is not None
    if isinstance(scheme, Fp8Scheme):
        quantized = activations is Activations.FP8
        return target.fp8_linear(outputs, inputs, scheme.block_inputs, dtype, first.bias, quantized)
    return Linear(
        target.isa,
        Packing(outputs, inputs, scheme.group_size, scheme.bits, scheme.levels),
        dtype,
        scheme.scale_dtype,
        scheme.zero,
        first.bias,
        activations,
        3 if dtype == "f32" else 2,
        int(options["min_tokens"]),
        target.platform,
    )


def _experts_kernels(
    target: Target,
    checkpoint: Checkpoint,
    model: Any,
    named: tuple[str, Sequence[str]],
    dtype: str,
    options: Mapping[str, Any],
) -> Moe | Fp8Moe:
    """The kernels that compute the experts of a block."""
    from halfbyte.checkpoints.expert_layers import quantized_experts
    from halfbyte.checkpoints.experts import ExpertsShape
    from halfbyte.layer_activations import LayerActivations
    from halfbyte.lowering.kernels.fp8_moe import Fp8ExpertLinear, Fp8Moe
    from halfbyte.lowering.kernels.fp8_packing import Fp8Packing
    from halfbyte.lowering.kernels.generator import Glu
    from halfbyte.lowering.kernels.moe import ExpertLinear, Moe
    from halfbyte.lowering.layout import Packing
    from halfbyte.passes.fp8_experts import Fp8Experts
    from halfbyte.passes.scheme import Activations

    name, members = named
    try:
        module = model.get_submodule(block_of(name))
    except AttributeError:
        raise _unknown(name) from None
    activations, digits = LayerActivations.of(options).choose, 3 if dtype == "f32" else 2
    experts = quantized_experts(checkpoint, name, module, members, activations, digits)
    shape = ExpertsShape.of(module)
    one_by_one = shape is not None and shape.weighed  # then every slot is a row of its own
    (inner, hidden), slots = experts.shape, 1 if one_by_one else model.config.num_experts_per_tok
    shared: dict[str, Any] = {
        "experts": experts.experts,
        "slots": slots,
        "io": dtype,
        "glu": Glu(experts.scheme.glu, experts.scheme.limit),
        "platform": target.platform,
    }
    up_shape, down_shape = (inner, hidden), (hidden, inner)
    if isinstance(experts, Fp8Experts):
        fp8 = experts.scheme
        gate_up = Fp8ExpertLinear("up", Fp8Packing(*up_shape, fp8.up.block_inputs), fp8.bias)
        back = Fp8ExpertLinear("down", Fp8Packing(*down_shape, fp8.down.block_inputs), fp8.bias)
        quantized = experts.activations is Activations.FP8
        return Fp8Moe(unit=target.float_unit, quantized=quantized, up=gate_up, down=back, **shared)
    scheme = experts.scheme

    def linear(kind: Literal["up", "down"], side: WeightScheme, shape: tuple[int, int]) -> ExpertLinear:
        packing = Packing(*shape, side.group_size, side.bits, side.levels)
        return ExpertLinear(kind, packing, scheme.bias, side.scale_dtype, side.zero)

    up, down = linear("up", scheme.up, up_shape), linear("down", scheme.down, down_shape)
    return Moe(isa=target.isa, activations=experts.activations, digits=digits, up=up, down=down, **shared)
