"""CUDA programs: NVIDIA's assembler takes them, they use the units they claim, and their products are right.

No test here runs on a GPU. What a GPU would compute is checked in parts: the kernels that CUDA shares with Vulkan run
there, and those with tensor cores run on Vulkan with the product replaced by its definition.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import test_attention_kernels as attention
import test_fp8_moe_kernels as fp8_experts
import test_fused_kernels as fused
import test_head_linear_kernels as heads
import test_moe_kernels as experts
from gpu_checks import check_fused
from kernel_cases import CASES, LARGE, WITH_MANY_ROWS, activations, expected
from layer_bundles import call_layer, compile_layers
from ptx_assembler import Entry, assembled, assembler
from slow import slow
from vulkan_device import far_rows, no_vulkan, same_values

import halfbyte
from halfbyte.errors import UsageError
from halfbyte.lowering.compiler import compile_module
from halfbyte.lowering.kernels.isa import TENSOR_CORES, InstructionSet
from halfbyte.lowering.kernels.platform import VULKAN_MMA, Platform
from halfbyte.lowering.layer_program import ArchivedLayer, layer_program
from halfbyte.lowering.targets.cuda import CudaTarget
from halfbyte.lowering.targets.vulkan import VulkanTarget
from halfbyte.passes.program import Program
from halfbyte.runtime import Bundle

OLDEST, NEWER = "sm_80", ("sm_86", "sm_89", "sm_90", "sm_120")
SURROUNDED = ("fused0", "fused1", "fused4")  # by norms, products and residuals


def layers_for(target: CudaTarget) -> list[ArchivedLayer]:
    """All cases for the oldest; of the others, whose kernels have the same text, a case of every mode."""
    isa, every = target.isa, target.architecture == OLDEST
    dense = [name for name in CASES if every or name in WITH_MANY_ROWS]
    surrounded = fused.CASES if every else SURROUNDED
    some = slice(None if every else 1)
    layers = [ArchivedLayer(name, CASES[name].linear(isa, target)) for name in dense]
    layers += [ArchivedLayer(name, fused.CASES[name].linear(isa, target)) for name in surrounded]
    layers += [ArchivedLayer(case.name, case.kernels(isa, target)) for case in experts.CASES[some]]
    return layers + [
        ArchivedLayer(f"fp8_{case.name}", case.kernels(target)) for case in fp8_experts.CASES[some]
    ]


@pytest.fixture(scope="module", params=[OLDEST, *NEWER])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Entry]:
    if assembler() is None:
        pytest.skip("no ptxas: pip install nvidia-cuda-nvcc")
    target = CudaTarget.named(request.param)
    folder = tmp_path_factory.mktemp("cuda")
    flags = [*target.flags, f"--iree-hal-dump-executable-files-to={folder / 'ptx'}"]
    compile_module(layer_program(layers_for(target)), flags, cache=False)
    return assembled(folder / "ptx", request.param, folder)


def test_integer_products_are_those_of_the_hardware(kernels: dict[str, Entry]) -> None:
    gemms = {name: entry for name, entry in kernels.items() if "_gemm_" in name and "_fp8_" not in name}
    assert len(gemms) > 8
    for name, entry in gemms.items():
        assert entry.count("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32"), name
        assert entry.count("dp4a.s32.s32"), name
        tables = "_w4e2m1_" in name or "_w4iq4nl_" in name
        assert entry.count("prmt.b32") >= 16 * tables, name  # eight for eight codes, in both forms
        assert entry.spilled == 0, f"{name} spills {entry.spilled} bytes of {entry.registers} registers"


def test_codes_are_rounded_as_the_reference_does(kernels: dict[str, Entry]) -> None:
    """Divisions are exact ones, whatever flags a compiler may have for faster ones."""
    quantizers = {name: entry for name, entry in kernels.items() if "_quantize_" in name}
    assert quantizers
    for name, entry in kernels.items():
        assert entry.count("div.full") == entry.count("div.approx") == 0, name
    for name, entry in quantizers.items():
        if "planes" not in name:
            assert entry.count("div.rn.f32") >= 2, name
        if "_norm" in name:
            assert entry.count("sqrt.rn.f32") == 1, name
            assert entry.count("sqrt.approx") == entry.count("rsqrt.approx") == 0, name


# The text of these kernels is one for all architectures.
@pytest.mark.parametrize("architecture", ["sm_80", pytest.param("sm_90", marks=slow)])
def test_decoders_are_assembled(architecture: str, tmp_path: Path) -> None:
    """Attention, caches, and IREE's own code around them."""
    if assembler() is None:
        pytest.skip("no ptxas: pip install nvidia-cuda-nvcc")
    names = ("smol", "odd", "sinks", "latents", "capped", "half", "uneven", "normed", "normed16", "latents16")
    entries = {f"{name}_some": attention.export(attention.CASES[name], None) for name in names}
    entries |= {f"{name}_one": attention.export(attention.CASES[name], 1) for name in names[:4]}
    entries |= {f"heads_{name}": heads.export(case, None) for name, case in heads.CASES.items()}
    dump = f"--iree-hal-dump-executable-files-to={tmp_path / 'ptx'}"
    options = halfbyte.CompileOptions(target="cuda", cuda_arch=architecture, iree_flags=(dump,), cache=False)
    compiled = halfbyte.compile(Program(entries), tmp_path / "out", options)
    [program] = compiled.manifest.programs
    assert (program.target, program.device, program.drivers) == ("cuda", architecture, ("cuda",))
    found = assembled(tmp_path / "ptx", architecture, tmp_path)
    ours = [entry for name, entry in found.items() if name.startswith("halfbyte_")]
    assert len(ours) >= 2 * len(names) - 1 and len(found) > len(ours)
    assert all(entry.spilled == 0 for entry in ours)
    normed = [entry for name, entry in found.items() if "_rotate_merged_append_" in name and "_norm" in name]
    assert len(normed) == 2
    for entry in normed:
        assert entry.count("sqrt.rn.f32") == 1 and entry.count("bar.sync") == 2
        assert not any(
            entry.count(rough) for rough in ("div.full", "div.approx", "rcp.approx", "sqrt.approx")
        )
    for part in ("segments", "join"):
        assert sum(name.startswith(f"halfbyte_attention_{part}_") for name in found) == 4
    assert sum(name.startswith("halfbyte_head_linear_") for name in found) == len(heads.CASES)


def test_unknown_architectures_are_refused_with_the_known_ones() -> None:
    for name in ("sm_100", "hopper", "sm_75", ""):
        with pytest.raises(
            UsageError, match=r"unknown CUDA architecture(.|\n)*accepted: sm_80, sm_86, sm_89, sm_90"
        ):
            CudaTarget.named(name)


class _TensorCoresByDefinition(VulkanTarget):
    @property
    def platform(self) -> Platform:
        return VULKAN_MMA

    @property
    def isa(self) -> InstructionSet:
        return TENSOR_CORES

    @property
    def flags(self) -> list[str]:
        return [flag.replace("memory_bytes = 16384", "memory_bytes = 32768") for flag in super().flags]


# One of every mode and width, and some of the others.
_DENSE = tuple(
    name
    for at, name in enumerate(CASES)
    if name in WITH_MANY_ROWS or (at % 9 == 0 and not name.startswith(tuple(LARGE)))
)
_EXPERTS = [case for at, case in enumerate(experts.CASES) if at % 4 == 0 or case.name == "e2m1"]


@pytest.fixture(scope="module")
def by_definition(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    if no_vulkan():
        pytest.skip(no_vulkan())
    chosen = [CASES[name] for name in _DENSE]
    folder = tmp_path_factory.mktemp("cuda") / "dense"
    return compile_layers(folder, chosen, TENSOR_CORES, _TensorCoresByDefinition(), "vulkan")


@pytest.mark.parametrize("name", _DENSE)
def test_tiles_for_tensor_cores_are_right(by_definition: Bundle, name: str) -> None:
    case, x = CASES[name], activations(name)
    few = call_layer(by_definition, name, x[:4])
    for rows in (9,) if len(x) < 20 else (5, 17, 65, 130):
        got = call_layer(by_definition, name, x[:rows])
        digits = case.few if rows < case.min_tokens else case.digits
        far = far_rows(got, expected(name, digits)[:rows])
        assert not far, f"{rows} rows, wrong {far}"
        assert case.min_tokens or same_values(got[:4], few)


def test_fused_tiles_for_tensor_cores_are_right(tmp_path: Path) -> None:
    if no_vulkan():
        pytest.skip(no_vulkan())
    target = _TensorCoresByDefinition()
    bundle = fused.compile_fused(tmp_path / "fused", SURROUNDED, TENSOR_CORES, target, "vulkan")
    for name in SURROUNDED:
        check_fused(bundle, name, (4, 5, 130))


def test_experts_on_tensor_cores_are_right(tmp_path: Path) -> None:
    if no_vulkan():
        pytest.skip(no_vulkan())
    target = _TensorCoresByDefinition()
    bundle = experts.compile_experts(tmp_path / "experts", _EXPERTS, TENSOR_CORES, target, "vulkan")
    for case in _EXPERTS:
        for tokens in (1, 17, 129):
            x, ids, weights = experts.routed(case, tokens)
            got = call_layer(bundle, case.name, x, ids, weights)
            far = far_rows(got, experts.expected(case.name, tokens))
            assert not far, f"{case.name}, {tokens} tokens, wrong {far}"
