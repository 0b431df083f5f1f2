"""Which targets options choose, and what their programs ask of a device."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from halfbyte.errors import UsageError
from halfbyte.lowering.compiler import compile_module
from halfbyte.lowering.options import CompileOptions
from halfbyte.lowering.targets.choice import chosen_targets, target_of
from halfbyte.lowering.targets.cuda import CudaTarget
from halfbyte.lowering.targets.vulkan import VulkanTarget
from halfbyte.runtime.manifest import Program

DESCRIPTION = (
    '#hal.device.target<"vulkan", [#hal.executable.target<"vulkan-spirv", "vulkan-spirv-fb", '
    '{iree_codegen.target_info = #iree_gpu.target<arch = "mine", features = "spirv:v1.6,cap:Shader", wgp = '
    "<compute = fp32|int32|int8, storage = b32|b16|b8, subgroup = SUBGROUP, dot = dp4xi8toi32, mma = [], "
    "subgroup_size_choices = [16, 32], max_workgroup_sizes = [128, 128, 64], max_thread_count_per_workgroup = 128, "
    "max_workgroup_memory_bytes = 16384, max_workgroup_counts = [65535, 65535, 65535]>>}>]>"
)

# The releases of NVIDIA's history of PTX.
CUDA_OF_PTX = {"7.6": "11.6", "8.0": "12.0", "8.4": "12.4", "8.7": "12.8", "8.8": "12.9"}


def subgroups(target: VulkanTarget) -> set[str]:
    return {name.removeprefix("subgroupSize") for name in target.features if name.startswith("subgroupSize")}


# ---------------------------------------------------------------- Vulkan


def test_portable_programs_count_on_no_size_of_subgroups() -> None:
    portable, without = VulkanTarget.named(), VulkanTarget.named("portable-nodot")
    assert not subgroups(portable) and not subgroups(without)
    assert portable.features - without.features == {"shaderIntegerDotProduct"}
    assert without.features < portable.features
    assert "vulkan-1.3" in without.features


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("ampere", {"32"}),
        ("rtx4090", {"32"}),
        ("sm_120", {"32"}),
        ("rdna3", {"32", "64"}),
        ("gfx942", {"64"}),
        ("mali-g715", {"16"}),
        ("adreno", {"64"}),
        ("llvmpipe", {"8"}),
    ],
)
def test_named_devices_are_iree_s(name: str, sizes: set[str]) -> None:
    target = VulkanTarget.named(name)
    assert subgroups(target) == sizes
    assert f"--iree-vulkan-target={name}" in target.flags and target.label == name


@pytest.mark.parametrize(
    "name", ["", "vp_android_baseline_2022", "videocore_vii", "sm_90", "toaster", "/nowhere", "x" * 5000]
)
def test_unknown_devices_are_refused_with_the_known(name: str) -> None:
    """And IREE's default with those whose bytes come out wrong."""
    with pytest.raises(
        UsageError, match=r"unknown kind of Vulkan device(.|\n)*accepted: portable, portable-nodot, rdna3"
    ):
        VulkanTarget.named(name)


@pytest.mark.parametrize(("subgroup", "sizes"), [("none", set()), ("shuffle|arithmetic", {"16", "32"})])
def test_a_file_describes_a_device(subgroup: str, sizes: set[str], tmp_path: Path) -> None:
    text = DESCRIPTION.replace("SUBGROUP", subgroup)
    (tmp_path / "device.txt").write_text(f"{text} : !hal.device\n")
    target = VulkanTarget.named(str(tmp_path / "device.txt"))
    assert target.label == "described" and f"--iree-hal-target-device={text}" in target.flags
    assert subgroups(target) == sizes and "shaderIntegerDotProduct" in target.features
    program = Program(target.name, "model.vmfb", "0" * 64, target.drivers, **target.runs_on)
    assert target_of(program) == target


@pytest.mark.parametrize("content", [b"", b"portable", b'#hal.device.target<"cuda", []>', b"\xff\xfe\x00"])
def test_files_with_something_else_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "device.txt").write_bytes(content)
    with pytest.raises(UsageError, match=r'not the description of a device(.|\n)*target<"vulkan"'):
        VulkanTarget.named(str(tmp_path / "device.txt"))


# ---------------------------------------------------------------- CUDA


@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120", "sm_121"])
def test_drivers_take_the_text_that_programs_are_in(architecture: str, tmp_path: Path) -> None:
    target = CudaTarget.named(architecture)
    body = "%y = arith.addf %x, %x : tensor<4xf32> return %y : tensor<4xf32>"
    text = f"func.func @f(%x: tensor<4xf32>) -> tensor<4xf32> {{ {body} }}"
    compile_module(text, [*target.flags, f"--iree-hal-dump-executable-files-to={tmp_path}"], cache=False)
    [ptx] = tmp_path.glob("*.ptx")
    found = re.search(r"^\.version (\S+)\n\.target (\w+)$", ptx.read_text(), re.MULTILINE)
    assert found is not None and found[2] == architecture
    assert target.runs_on["features"] == (f"cuda-{CUDA_OF_PTX[found[1]]}",)


# ---------------------------------------------------------------- choice


def test_targets_stand_in_the_order_of_the_options() -> None:
    options = CompileOptions(
        target="vulkan,cpu,cuda,vulkan", vulkan_target="portable-nodot,ampere", cuda_arch="sm_80,sm_90,sm_80"
    )
    assert [(target.name, target.label) for target in chosen_targets(options)] == [
        ("vulkan", "portable-nodot"),
        ("vulkan", "ampere"),
        ("cpu", "host"),
        ("cuda", "sm_80"),
        ("cuda", "sm_90"),
    ]
    assert [target.name for target in chosen_targets(CompileOptions())] == ["cpu"]


@pytest.mark.parametrize("target", ["toaster", "cpu,,vulkan", "", "cpu, vulkan"])
def test_unknown_targets_are_refused_with_the_known(target: str) -> None:
    with pytest.raises(UsageError, match=r"--target: unknown target(.|\n)*accepted: cpu, cuda, vulkan"):
        chosen_targets(CompileOptions(target=target))


def test_one_file_holds_one_of_each_kind() -> None:
    options = CompileOptions(target="cpu,vulkan,cuda", fat=True)
    assert len(chosen_targets(options)) == 3
    with pytest.raises(UsageError, match=r"--fat: one file(.|\n)*cpu host, cuda sm_80, cuda sm_90"):
        chosen_targets(CompileOptions(target="cpu,cuda", cuda_arch="sm_80,sm_90", fat=True))
