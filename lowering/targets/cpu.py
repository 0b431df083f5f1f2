"""The CPU target: instruction set, flags, packed layout and kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from halfbyte.errors import UsageError
from halfbyte.lowering import layout
from halfbyte.lowering.kernels.isa import InstructionSet, best
from halfbyte.lowering.kernels.linear import Linear
from halfbyte.lowering.parameters import ParameterGroup, TensorSpec
from halfbyte.passes.program import LayerSource
from halfbyte.runtime.cpu_features import architecture, host_features

# Of a host's features those that code generation uses: a machine may lack the others and still run the program.
_USED = ("sse", "ssse", "avx", "fma", "f16c", "bmi", "lzcnt", "popcnt", "movbe", "gfni", "cx16")
# What LLVM turns on for these names, as far as IREE's code generation and our kernels use it.
_V2 = {"sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "cx16"}
_V3 = _V2 | {"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_NAMED: Mapping[str, tuple[str, frozenset[str]]] = {
    "x86-64": ("x86_64", frozenset()),
    "x86-64-v2": ("x86_64", frozenset(_V2)),
    "x86-64-v3": ("x86_64", frozenset(_V3)),
    "x86-64-v4": ("x86_64", frozenset(_V4)),
    "cascadelake": ("x86_64", frozenset(_V4 | {"avx512vnni"})),
    "znver4": ("x86_64", frozenset(_V4 | {"avx512vnni", "avx512bf16", "avx512vbmi"})),
}


@dataclass(frozen=True)
class CpuTarget:
    """One kind of CPU.

    Attributes:
        cpu: ``host``, or a name of `names`.
        architecture: ``x86_64`` or ``aarch64``.
        features: what the program may use, in LLVM's spelling; the manifest records them.
    """

    cpu: str
    architecture: str
    features: frozenset[str]
    name: str = "cpu"
    layout: str = layout.NAME
    drivers: tuple[str, ...] = ("local-task", "local-sync")

    @classmethod
    def named(cls, cpu: str = "host") -> CpuTarget:
        """The target of a ``--cpu`` option.

        Raises:
            UsageError: naming the known names.
        """
        if cpu == "host":
            here = architecture()
            used = [f for f in host_features() if here != "x86_64" or f.startswith(_USED)]
            return cls(cpu, here, frozenset(used))
        if cpu not in _NAMED:
            raise UsageError(
                "unknown CPU",
                where="--cpu",
                found=cpu,
                accepted=", ".join(names()),
                advice="use host for this machine",
            )
        return cls(cpu, *_NAMED[cpu])

    @property
    def isa(self) -> InstructionSet:
        return best(self.features)

    @property
    def soft_f16(self) -> bool:
        """Whether f16 must be cast by integer arithmetic: the CPU has no instruction for it."""
        return self.architecture == "x86_64" and "f16c" not in self.features

    @property
    def flags(self) -> list[str]:
        """For iree-compile."""
        flags = ["--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=llvm-cpu"]
        if self.cpu == "host":
            return [*flags, "--iree-llvmcpu-target-cpu=host"]
        triple = f"--iree-llvmcpu-target-triple={self.architecture}-linux-gnu"
        return [*flags, triple, f"--iree-llvmcpu-target-cpu={self.cpu}"]

    def pack(self, name: str, linear: Linear, source: LayerSource) -> ParameterGroup:
        """The packed weight of a layer, as the kernels of ``linear`` take it."""
        specs = tuple(TensorSpec(f"{name}.{a.name}", a.shape, a.dtype) for a in linear.arguments)

        def make() -> dict[str, np.ndarray]:
            weight = source.weight()
            made = {
                "codes": layout.pack_codes(weight),
                "scale": layout.pack_groups(weight.scale),
            }
            for part, values in (("zero", weight.zero), ("minimum", weight.minimum)):
                if values is not None:
                    made[part] = layout.pack_groups(values)
            if linear.bias:
                bias = source.bias() if source.bias else torch.zeros(linear.packing.outputs)
                made["bias"] = layout.pack_bias(bias)
            return {spec.key: made[spec.key.rpartition(".")[2]] for spec in specs}

        return ParameterGroup(specs, make)


def names() -> list[str]:
    """What ``--cpu`` takes."""
    return ["host", *_NAMED]
