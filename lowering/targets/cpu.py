"""The CPU target: instruction set, flags, packed layout and kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from halfbyte.errors import UnsupportedLayerError, UsageError
from halfbyte.lowering import layout
from halfbyte.lowering.kernels.fp8_kernels import FloatUnit
from halfbyte.lowering.kernels.fp8_linear import Fp8Linear
from halfbyte.lowering.kernels.fp8_moe import Fp8Moe
from halfbyte.lowering.kernels.fp8_packing import Fp8Packing
from halfbyte.lowering.kernels.isa import BEST_FIRST, InstructionSet, best
from halfbyte.lowering.kernels.linear import Linear
from halfbyte.lowering.kernels.moe import Moe
from halfbyte.lowering.parameters import NUMPY, ParameterGroup, TensorSpec
from halfbyte.passes.program import ExpertsSource, LayerSource
from halfbyte.passes.weight import Fp8Tensor, QuantTensor
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
class CpuTarget:
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
    def isa(self) -> InstructionSet:
        return best(self.features)

    @property
    def float_unit(self) -> FloatUnit:
        """What multiplies e4m3 weights."""
        return FloatUnit.of(self.features)

    @property
    def soft_f16(self) -> bool:
        """Whether f16 must be cast by integer arithmetic: the CPU has no instruction for it."""
        return self.architecture == "x86_64" and "f16c" not in self.features

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

    def pack(self, name: str, linear: Linear | Fp8Linear, source: LayerSource) -> ParameterGroup:
        """The packed weight of a layer, as the kernels of ``linear`` take it."""
        specs = tuple(TensorSpec(f"{name}.{a.name}", a.shape, a.dtype) for a in linear.arguments)

        def make() -> dict[str, np.ndarray]:
            made = _packed(source.weight())
            if linear.bias:
                assert source.bias is not None
                made["bias"] = layout.pack_bias(source.bias())
            return {spec.key: made[spec.key.rpartition(".")[2]] for spec in specs}

        return ParameterGroup(specs, make)

    def pack_experts(self, name: str, moe: Moe | Fp8Moe, source: ExpertsSource) -> ParameterGroup:
        """The packed weights of a layer of experts, as the kernels of ``moe`` take them, expert by expert."""
        sides = {
            side.kind: tuple(
                TensorSpec(f"{name}.{a.name}", a.shape, a.dtype) for a in side.arguments(moe.experts)
            )
            for side in (moe.up, moe.down)
        }

        def both(expert: int) -> dict[str, np.ndarray]:
            gate, up = _packed_source(source.gate(expert)), _packed_source(source.up(expert))
            return {part: layout.side_by_side(gate[part], up[part]) for part in gate}

        def make() -> dict[str, np.ndarray | Iterator[np.ndarray]]:
            up = _by_expert(sides["up"], source.experts, both)
            return up | _by_expert(
                sides["down"], source.experts, lambda expert: _packed_source(source.down(expert))
            )

        return ParameterGroup((*sides["up"], *sides["down"]), make)

    def fp8_linear(
        self, outputs: int, inputs: int, block: int, io: str, bias: bool, quantized: bool
    ) -> Fp8Linear:
        """The kernels of a linear with e4m3 weights."""
        packing = Fp8Packing(outputs, inputs, block)
        return Fp8Linear(packing, io, bias, quantized, self.float_unit, self.soft_f16)


def _by_expert(
    specs: Sequence[TensorSpec], experts: int, packed: Callable[[int], dict[str, np.ndarray]]
) -> dict[str, np.ndarray | Iterator[np.ndarray]]:
    """The tensors of all experts, of which one at a time is packed: the codes in pieces, and what they leave behind.

    The others are a small part of the codes' bytes, so that the experts need not be packed once more for them.
    """
    codes, *others = specs
    kept = {spec.key: np.empty(spec.shape, NUMPY[spec.dtype]) for spec in others}

    def pieces() -> Iterator[np.ndarray]:
        for expert in range(experts):
            made = packed(expert)
            for key, whole in kept.items():
                size = len(whole) // experts
                flat = made[key.rpartition(".")[2]].reshape(size, *whole.shape[1:])
                whole[expert * size : (expert + 1) * size] = flat.view(whole.dtype)
            yield made["codes"]

    return {codes.key: pieces(), **kept}


def _packed(weight: QuantTensor | Fp8Tensor) -> dict[str, np.ndarray]:
    """The tensors of a weight in the layout of this target, without the bias."""
    if isinstance(weight, Fp8Tensor):
        scales = layout.pack_block_scales(weight.scale, weight.shape[0], weight.block_outputs)
        return {"codes": layout.pack_fp8(weight.bits), "scale": scales}
    made = {"codes": layout.pack_codes(weight), "scale": layout.pack_groups(weight.scale)}
    if weight.zero is not None:
        _check_zeros(weight.name, weight.zero, 2**weight.bits)
    for part, values in (("zero", weight.zero), ("minimum", weight.minimum)):
        if values is not None:
            made[part] = layout.pack_groups(values)
    return made


def _check_zeros(name: str, zeros: torch.Tensor, codes: int) -> None:
    """Kernels take the zeros of 4-bit codes off in bytes; GPTQ's stored z - 1 reaches one past the codes."""
    highest = int(zeros.max()) if zeros.numel() else 0
    if highest > codes:
        raise UnsupportedLayerError(
            "a zero point lies outside of the codes",
            where=name,
            found=str(highest),
            accepted=f"0 to {codes}",
            advice="quantize the layer again, or give its offset as `minimum`",
        )


def _packed_source(source: LayerSource) -> dict[str, np.ndarray]:
    """The same with its bias, in blocks of 64."""
    made = _packed(source.weight())
    if source.bias is not None:
        made["bias"] = layout.pack_bias(source.bias()).reshape(-1, 64)
    return made


def names() -> list[str]:
    """What ``--cpu`` takes."""
    return ["host", *_NAMED]
