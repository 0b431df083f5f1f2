"""The CPU target: instruction set, flags, packed layout and kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from halfbyte.errors import UsageError
from halfbyte.lowering.kernels.attention import Attention, AttentionShape, best_unit, vector_unit
from halfbyte.lowering.kernels.fp8_kernels import FloatUnit
from halfbyte.lowering.kernels.head_linear import HeadLinear
from halfbyte.lowering.kernels.isa import BEST_FIRST, InstructionSet, best
from halfbyte.lowering.kernels.platform import CPU, CPU_WITHOUT_F16C, Platform
from halfbyte.lowering.targets.target import Target
from halfbyte.runtime.cpu_features import architecture, host_features

# Of a host's features those that code generation uses: a machine may lack the others and still run the program.
_USED = ("sse", "ssse", "avx", "fma", "f16c", "bmi", "lzcnt", "popcnt", "movbe", "gfni", "cx16", "amx")
# What LLVM turns on for these names, as far as IREE's code generation and our kernels use it.
_V2 = {"sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "cx16"}
_V3 = _V2 | {"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_AMX = ("avx512bf16", "amx-tile", "amx-int8", "amx-bf16")
_ARM = {"neon", "fp-armv8"}
# name -> architecture, LLVM's CPU, what is turned on beyond it, and everything that is then in use.
_NAMED: Mapping[str, tuple[str, str, tuple[str, ...], frozenset[str]]] = {
    "x86-64": ("x86_64", "x86-64", (), frozenset()),
    "x86-64-v2": ("x86_64", "x86-64-v2", (), frozenset(_V2)),
    "x86-64-v3": ("x86_64", "x86-64-v3", (), frozenset(_V3)),
    "avxvnni": ("x86_64", "x86-64-v3", ("avxvnni",), frozenset(_V3 | {"avxvnni"})),
    "x86-64-v4": ("x86_64", "x86-64-v4", (), frozenset(_V4)),
    "avx512vnni": ("x86_64", "x86-64-v4", ("avx512vnni",), frozenset(_V4 | {"avx512vnni"})),
    "avx512bf16": (
        "x86_64",
        "x86-64-v4",
        ("avx512vnni", "avx512bf16"),
        frozenset(_V4 | {"avx512vnni", "avx512bf16"}),
    ),
    "amx": ("x86_64", "x86-64-v4", ("avx512vnni", *_AMX), frozenset(_V4 | {"avx512vnni", *_AMX})),
    "aarch64": ("aarch64", "generic", (), frozenset(_ARM)),
    "aarch64-dotprod": ("aarch64", "generic", ("dotprod",), frozenset(_ARM | {"dotprod"})),
    "aarch64-i8mm": ("aarch64", "generic", ("dotprod", "i8mm"), frozenset(_ARM | {"dotprod", "i8mm"})),
}


@dataclass(frozen=True)
class CpuTarget(Target):
    """One kind of CPU.

    Attributes:
        cpu: ``host``, or a name of `names`.
        architecture: ``x86_64`` or ``aarch64``.
        features: what the program may use, in LLVM's spelling; the manifest records them.
        llvm_cpu: what iree-compile is told.
        llvm_features: what is turned on beyond it.
    """

    cpu: str
    architecture: str
    features: frozenset[str]
    llvm_cpu: str = "host"
    llvm_features: tuple[str, ...] = ()
    name: ClassVar[str] = "cpu"
    drivers: ClassVar[tuple[str, ...]] = ("local-task", "local-sync")
    device_id: ClassVar[str] = "local*"

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
        where, llvm_cpu, more, everything = _NAMED[cpu]
        return cls(cpu, where, everything, llvm_cpu, more)

    @classmethod
    def listed(cls, cpus: str) -> tuple[CpuTarget, ...]:
        """The targets of a comma-separated ``--cpu`` option, the best instruction set first."""
        targets = [cls.named(cpu) for cpu in dict.fromkeys(cpus.split(","))]
        return tuple(
            sorted(targets, key=lambda target: (BEST_FIRST.index(target.isa), -len(target.features)))
        )

    @property
    def label(self) -> str:
        return self.cpu

    @property
    def runs_on(self) -> dict[str, Any]:
        features = tuple(sorted(self.features))
        return {"architecture": self.architecture, "cpu": self.cpu, "features": features}

    @property
    def host(self) -> str:
        """What ``host`` stands for in the flags, if it does: part of what a compiled program is known by."""
        return ",".join(sorted(self.features)) if self.cpu == "host" else ""

    @property
    def isa(self) -> InstructionSet:
        return best(self.features)

    @property
    def float_unit(self) -> FloatUnit:
        """What multiplies e4m3 weights."""
        return FloatUnit.of(self.features)

    @property
    def platform(self) -> Platform:
        """Without F16C, f16 is cast by integer arithmetic."""
        return CPU_WITHOUT_F16C if self.architecture == "x86_64" and "f16c" not in self.features else CPU

    def attention(self, shape: AttentionShape, io: str, cache: str, one_token: bool) -> Attention:
        unit = best_unit(self.features, shape, cache, one_token)
        return Attention(unit, shape, io, io, cache, one_token, self.platform)

    def head_linear(
        self, inputs: int, outputs: int, kept: int, io: str, weight: str, one_token: bool
    ) -> HeadLinear:
        unit = vector_unit(self.features)
        return HeadLinear(inputs, outputs, kept, io, weight, one_token, unit, self.platform)

    @property
    def flags(self) -> list[str]:
        """For iree-compile."""
        flags = ["--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=llvm-cpu"]
        flags.append(f"--iree-llvmcpu-target-cpu={self.llvm_cpu}")
        flags.append("--iree-llvmcpu-stack-allocation-limit=65536")  # AMX's sums, attention's rows
        if self.cpu != "host":
            flags.append(f"--iree-llvmcpu-target-triple={self.architecture}-linux-gnu")
        if self.llvm_features:
            flags.append(
                "--iree-llvmcpu-target-cpu-features=" + ",".join(f"+{f}" for f in self.llvm_features)
            )
        return flags


def names() -> list[str]:
    """What ``--cpu`` takes."""
    return ["host", *_NAMED]
