"""Compares the packed layers of a bundle, one by one, with the references of their operators."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from halfbyte.progress import Progress

if TYPE_CHECKING:
    import torch

    from halfbyte.checkpoints import Checkpoint
    from halfbyte.lowering.kernels.fp8_linear import Fp8Linear
    from halfbyte.lowering.kernels.linear import Linear
    from halfbyte.lowering.layer_program import ArchivedLayer
    from halfbyte.passes.weight import Weight
    from halfbyte.runtime import Bundle
    from halfbyte.runtime.manifest import EntryPoint

# Kernels of e4m3 weights add inside a piece of a block in float32, the reference adds it exactly.
FP8_LIMIT = 1e-5
# Outputs of a layer that its references are computed for at a time: they take 8 bytes per weight and more.
_ROWS = 8192
# Where a GPU does not fuse multiplications and additions. A last bit of gate times up may turn a code.
GPU_LIMIT, GPU_EXPERTS_LIMIT = 1e-6, 5e-3


@dataclass(frozen=True)
class LayerCheck:
    """One packed layer against its operator's reference, given the same input.

    Attributes:
        name: as the archive calls it; merged layers and the experts of a block are checked as one.
        rows: tokens compared.
        equal: whether every output has the bits of the reference.
        error: largest difference to the reference, over the largest output of its row. For e4m3 weights what the
            cast to 16 bits may do is taken off, and of experts with e4m3 activations what `fp8_flips` allows.
        limit: of ``error`` by the kernel's own promise: 0 on CPUs, `GPU_LIMIT` on GPUs; `FP8_LIMIT` for e4m3 weights.
        float_error: the same against the float layer (of experts, transformers' own module in float32): what
            quantizing the activations costs.
    """

    name: str
    rows: int
    equal: bool
    error: float
    float_error: float
    limit: float = 0.0


# What a layer was given in the float model, [T, K] and, for experts, ids and weights [T, k]; and what it gave.
LayerInputs = tuple[tuple["torch.Tensor", ...], "torch.Tensor"]


def check_layers(
    folder: Path,
    bundle: Bundle,
    checkpoint: Checkpoint,
    layers: Sequence[ArchivedLayer],
    inputs: Mapping[str, LayerInputs],
    options: Mapping[str, Any],
    progress: Progress,
) -> list[LayerCheck]:
    """Runs every layer alone, from the bundle's archive, on the inputs that it had in the float model.

    Args:
        folder: of the bundle.
        bundle: loaded.
        checkpoint: it was compiled from.
        layers: of its archive.
        inputs: by the name of the layer.
        options: of the compilation.
        progress: told how many layers are done.
    """
    if not layers:
        return []
    checks: list[LayerCheck] = []
    with tempfile.TemporaryDirectory(prefix="halfbyte-verify-") as scratch:
        runner = _layer_bundle(Path(scratch), folder, bundle, layers, options)
        for layer in layers:
            checks.append(_check_layer(runner, checkpoint, layer, inputs[layer.name]))
            progress.advance(len(checks), len(layers))
    return checks


def _layer_bundle(
    scratch: Path, folder: Path, bundle: Bundle, layers: Sequence[ArchivedLayer], options: Mapping[str, Any]
) -> Bundle:
    """A bundle of single layers: the same kernels and target, the same archive."""
    from dataclasses import replace

    from halfbyte.lowering.bundle import sha256, write_json
    from halfbyte.lowering.compiler import compile_module
    from halfbyte.lowering.layer_program import layer_program
    from halfbyte.lowering.targets.choice import target_of
    from halfbyte.runtime import load
    from halfbyte.runtime.manifest import FILE_NAME, Manifest, Model
    from halfbyte.runtime.program import choose_program

    program = choose_program(bundle.device, bundle.manifest)
    target = target_of(program)
    flags = [*target.input_flags, *target.flags, *options["iree_flags"]]
    vmfb, _ = compile_module(layer_program(layers), flags, host=target.host)
    (scratch / program.file).write_bytes(vmfb)
    for archive in bundle.manifest.parameters:
        (scratch / archive.file).symlink_to((folder / archive.file).resolve())
    entries = {layer.function: _entry(layer) for layer in layers}
    programs = (replace(program, sha256=sha256(scratch / program.file)),)
    manifest = Manifest(
        Model("graph", bundle.manifest.model.dtype), programs, bundle.manifest.parameters, entries
    )
    write_json(scratch / FILE_NAME, manifest.to_json())
    return load(scratch, device=bundle.device.spec, threads=bundle.device.threads, parameters="mmap")


def _entry(layer: ArchivedLayer) -> EntryPoint:
    from halfbyte.lowering.kernels.fp8_moe import Fp8Moe
    from halfbyte.lowering.kernels.moe import Moe
    from halfbyte.runtime.manifest import EntryPoint, Tensor

    kernels = layer.linear
    given = [Tensor("x", ("T", layer.inputs), kernels.io)]
    if isinstance(kernels, Moe | Fp8Moe):
        given += [Tensor("ids", ("T", kernels.slots), "i64"), Tensor("weights", ("T", kernels.slots), "f32")]
    return EntryPoint(tuple(given), (Tensor("y", ("T", layer.outputs), kernels.io),))


def _check_layer(
    runner: Bundle, checkpoint: Checkpoint, layer: ArchivedLayer, seen: LayerInputs
) -> LayerCheck:
    import torch

    from halfbyte.lowering.kernels.fp8_moe import Fp8Moe
    from halfbyte.lowering.kernels.moe import Moe

    kinds = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    (x, *routed), output = seen
    x, io = x.to(kinds[layer.linear.io]), layer.linear.io
    if isinstance(layer.linear, Moe):
        reference = _experts_reference(checkpoint, layer, x, *routed, exact=output)
    elif isinstance(layer.linear, Fp8Moe):
        reference = _fp8_experts_reference(checkpoint, layer, x, *routed, exact=output)
    else:
        reference = _linear_reference(checkpoint, layer, x, seen[0][0])
    given = (reference.x.view(torch.uint16) if io == "bf16" else reference.x, *reference.routed)
    [raw] = runner.call(layer.function, *(value.contiguous().numpy() for value in given))
    got = torch.from_numpy(np.array(raw))
    got = (got.view(torch.bfloat16) if io == "bf16" else got).float()
    want, allowed, limit = reference.want.float(), reference.allowed, reference.limit
    if runner.device.target != "cpu":
        limit = max(limit, GPU_EXPERTS_LIMIT if _is_twice_quantized(layer.linear) else GPU_LIMIT)
    if limit and io != "f32":  # the cast may fall to either side
        allowed = allowed + torch.finfo(kinds[io]).eps * want.abs()
    return LayerCheck(
        layer.name,
        int(x.shape[0]),
        bool(torch.equal(got, want)),
        _row_error(got.double(), want.double(), allowed),
        _row_error(got.double(), reference.exact.double()),
        limit,
    )


def _is_twice_quantized(linear: Any) -> bool:
    from halfbyte.lowering.kernels.moe import Moe
    from halfbyte.passes.scheme import Activations

    return isinstance(linear, Moe) and linear.activations is not Activations.NONE


@dataclass(frozen=True)
class _Reference:
    """What a layer's function is given, what it should give, and what the float layer gives.

    Attributes:
        allowed: how far each result may be off beyond ``limit``, if at all.
    """

    x: torch.Tensor
    want: torch.Tensor
    exact: torch.Tensor
    limit: float = 0.0
    routed: tuple[torch.Tensor, ...] = ()
    allowed: torch.Tensor | float = 0.0


def _linear_reference(
    checkpoint: Checkpoint, layer: ArchivedLayer, ordered: torch.Tensor, x: torch.Tensor
) -> _Reference:
    import torch

    from halfbyte.lowering.kernels.fp8_linear import Fp8Linear
    from halfbyte.lowering.kernels.linear import Linear
    from halfbyte.passes.merge_linears import join_weights
    from halfbyte.passes.weight import Fp8Tensor, QuantTensor

    linear, members = layer.linear, layer.members
    assert isinstance(linear, Linear | Fp8Linear)
    weight = join_weights(layer.name, map(checkpoint.quantized, members), layer.outputs)
    biases = [checkpoint.float_tensor(f"{member}.bias").float() for member in members] if linear.bias else []
    bias = torch.cat(biases) if biases else None
    if isinstance(weight, QuantTensor) and weight.permutation is not None:
        ordered = ordered[:, weight.permutation]
    given = checkpoint.layers[members[0]].fixed
    fixed = None if layer.fixed is None or given is None else given.tensor()
    wanted, exacts = [], []
    for start in range(0, layer.outputs, _ROWS):
        part = weight.rows(start, start + _ROWS)
        added = None if bias is None else bias[start : start + _ROWS]
        wanted.append(_reference_rows(linear, part, ordered, added, fixed))
        exacts.append(x.double() @ part.dequantize().double().T + (0 if added is None else added.double()))
    limit = FP8_LIMIT if isinstance(weight, Fp8Tensor) else 0.0
    return _Reference(ordered, torch.cat(wanted, -1), torch.cat(exacts, -1), limit)


def _reference_rows(
    linear: Linear | Fp8Linear,
    weight: Weight,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    fixed: torch.Tensor | None,
) -> torch.Tensor:
    """What the layer's operator gives for some of its outputs."""
    import torch

    from halfbyte.lowering.kernels.linear import Linear
    from halfbyte.passes.weight import Fp8Tensor

    if isinstance(weight, Fp8Tensor):
        mode = "none" if isinstance(linear, Linear) or not linear.quantized else "fp8"
        blocks = (weight.block_outputs, weight.block_inputs)
        return torch.ops.halfbyte.fp8_block_linear(x, weight.bits, weight.scale, bias, *blocks, mode)
    assert isinstance(linear, Linear)
    return torch.ops.halfbyte.linear(
        x,
        weight.packed(),
        weight.scale,
        weight.zero,
        weight.minimum,
        bias,
        weight.bits,
        weight.group_size,
        linear.activations.value,
        linear.digits,
        linear.min_tokens,
        weight.levels.value,
        fixed,
    )


def _experts_reference(
    checkpoint: Checkpoint,
    layer: ArchivedLayer,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    exact: torch.Tensor,
) -> _Reference:
    import torch

    from halfbyte.checkpoints.expert_layers import experts_source
    from halfbyte.lowering.kernels.moe import Moe
    from halfbyte.passes.stacked_experts import stacked_parts

    moe, factors = layer.linear, weights.float()
    assert isinstance(moe, Moe)
    up, down = stacked_parts(experts_source(checkpoint, layer.members, moe.up.zero, moe.down.zero))
    settings = (moe.up.packing.bits, moe.up.packing.group_size, moe.down.packing.group_size)
    levels = moe.up.packing.levels.value
    mode = (moe.activations.value, moe.digits, moe.glu.kind, moe.glu.limit, levels)
    want = torch.ops.halfbyte.moe(x, ids, factors, *up, *down, *settings, *mode)
    return _Reference(x, want, exact, routed=(ids, factors))


def _fp8_experts_reference(
    checkpoint: Checkpoint,
    layer: ArchivedLayer,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    exact: torch.Tensor,
) -> _Reference:
    import torch

    from halfbyte.checkpoints.expert_layers import experts_source
    from halfbyte.fp8_flips import fp8_flips
    from halfbyte.lowering.kernels.fp8_moe import Fp8Moe
    from halfbyte.passes.stacked_experts import stacked_parts
    from halfbyte.passes.weight import Fp8Tensor

    moe, factors = layer.linear, weights.float()
    assert isinstance(moe, Fp8Moe)
    source = experts_source(checkpoint, layer.members)
    up, down = stacked_parts(source)
    linears = (source.up(0).weight(), source.down(0).weight())
    blocks = [size for w in linears if isinstance(w, Fp8Tensor) for size in (w.block_outputs, w.block_inputs)]
    mode = ("fp8" if moe.quantized else "none", moe.glu.kind, moe.glu.limit)
    want = torch.ops.halfbyte.fp8_block_moe(x, ids, factors, *up, *down, *blocks, *mode)
    allowed = (
        fp8_flips(source, x, ids, factors, (moe.glu.kind, moe.glu.limit), FP8_LIMIT) if moe.quantized else 0.0
    )
    return _Reference(x, want, exact, FP8_LIMIT, (ids, factors), allowed)


def _row_error(got: torch.Tensor, want: torch.Tensor, allowed: torch.Tensor | float = 0.0) -> float:
    largest = want.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    error = (((got - want).abs() - allowed).clamp_min(0) / largest).amax()
    return float(error) if bool(error == error) else float("inf")
