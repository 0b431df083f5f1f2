"""Bundles of single quantized linears: one function each, so that one compilation serves many tests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from foreign_cpu import AnyBundle, opened
from numpy_twin import E4M3, Array, Weight
from torch_bridge import layer_source

from halfbyte.lowering.archive import write_archive
from halfbyte.lowering.compiler import compile_module
from halfbyte.lowering.kernels.isa import InstructionSet
from halfbyte.lowering.kernels.linear import Linear
from halfbyte.lowering.kernels.moe import Moe
from halfbyte.lowering.layer_program import ArchivedLayer, layer_program
from halfbyte.lowering.layout import Packing
from halfbyte.lowering.parameters import ParameterGroup, Parameters
from halfbyte.lowering.targets.target import Target
from halfbyte.passes.levels import Levels
from halfbyte.passes.program import LayerSource
from halfbyte.passes.scheme import Activations, Zero
from halfbyte.runtime.manifest import (
    FILE_NAME,
    EntryPoint,
    Manifest,
    Model,
    ParameterArchive,
    ParameterTensor,
    Program,
    Tensor,
)


@dataclass(frozen=True)
class Case:
    """A linear to compile. digits as for the twin; with ``min_tokens`` the float path has ``few`` digits."""

    name: str
    weight: Weight
    io: str
    digits: int
    min_tokens: int = 0
    few: int = 3

    def linear(self, isa: InstructionSet, target: Target) -> Linear:
        weight = self.weight
        outputs, inputs = weight.codes.shape
        kind = (
            Zero.INTEGER
            if weight.zero is not None
            else Zero.SYMMETRIC
            if weight.minimum is None
            else Zero.MINIMUM
        )
        names = {np.dtype("f4"): "f32", np.dtype("f2"): "f16", np.dtype(ml_dtypes.bfloat16): "bf16"}
        return Linear(
            isa,
            Packing(outputs, inputs, weight.group_size, weight.bits, Levels(weight.levels)),
            self.io,
            names[weight.scale.dtype],
            kind,
            weight.bias is not None,
            {1: Activations.INT8, E4M3: Activations.FP8}.get(self.digits, Activations.NONE),
            self.few if self.digits in (1, E4M3) else self.digits,
            self.min_tokens,
            target.platform,
        )

    def source(self) -> LayerSource:
        return layer_source(self.name, self.weight)


def compile_layers(
    folder: Path, cases: Iterable[Case], isa: InstructionSet, target: Target, device: str = "cpu"
) -> AnyBundle:
    """Compiles every case for a target, with the kernels of an instruction set, and loads the result."""
    layers = []
    for case in cases:
        linear = case.linear(isa, target)
        outputs, inputs = case.weight.codes.shape
        group = target.pack(case.name, linear, case.source())
        layers.append((case.name, linear, group, (((inputs,), case.io),), ((outputs,), case.io)))
    return compile_program(folder, layers, target, device)


Sizes = tuple[tuple[int, ...], str]  # of one row, and its dtype


def compile_program(
    folder: Path,
    made: Iterable[tuple[str, Linear | Moe, ParameterGroup, tuple[Sizes | Tensor, ...], Sizes]],
    target: Target,
    device: str = "cpu",
) -> AnyBundle:
    """A bundle with one function for every (name, kernels, packed weights, inputs, output)."""
    folder.mkdir(parents=True)
    parameters, layers, entries = Parameters(), [], {}
    for name, kernels, group, inputs, (shape, dtype) in made:
        parameters.add(name, group)
        layer = ArchivedLayer(name, kernels)
        layers.append(layer)
        takes = tuple(
            given if isinstance(given, Tensor) else Tensor(f"x{i}", ("T", *given[0]), given[1])
            for i, given in enumerate(inputs)
        )
        entries[layer.function] = EntryPoint(takes, (Tensor("y", ("T", *shape), dtype),))
    content, _ = compile_module(layer_program(layers), [*target.input_flags, *target.flags], host=target.host)
    (folder / "model.vmfb").write_bytes(content)
    digest = write_archive(folder / "model.irpa", parameters)
    digested = hashlib.sha256(content).hexdigest()
    program = Program(target.name, "model.vmfb", digested, target.drivers, **target.runs_on)
    tensors = {spec.key: ParameterTensor(spec.bytes) for spec in parameters.tensors}
    size = (folder / "model.irpa").stat().st_size
    archive = ParameterArchive("model", "model.irpa", digest, target.layout, size, (target.name,), tensors)
    manifest = Manifest(Model("graph", "f32"), (program,), (archive,), entries)
    (folder / FILE_NAME).write_text(json.dumps(manifest.to_json()))
    return opened(folder, target, device)


def call_layer(bundle: AnyBundle, name: str, x: Array, *more: Array) -> Array:
    """The layer's outputs in the dtype of x."""
    carrier = x.view(np.uint16) if x.dtype == ml_dtypes.bfloat16 else x
    [y] = bundle.call(f"layer_{name}", np.ascontiguousarray(carrier), *more)
    return y.view(ml_dtypes.bfloat16) if x.dtype == ml_dtypes.bfloat16 else y
