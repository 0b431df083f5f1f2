"""CPU features in LLVM's names."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfbyte.runtime import cpu_features

X86 = """
processor\t: 0
flags\t\t: fpu lm pni sse4_1 sse4_2 avx2 abm avx512f avx512_vnni avx512_bf16 avx_vnni amx_tile bogus
processor\t: 1
flags\t\t: fpu lm pni sse4_1 sse4_2 avx2 abm avx512f avx512_vnni avx512_bf16
"""
ARM = """
processor\t: 0
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp asimddp sve i8mm bf16
CPU implementer\t: 0x41
"""


def test_translates_the_kernel_s_names_and_keeps_what_all_cpus_have() -> None:
    found = cpu_features.parse_cpuinfo(X86, "x86_64")
    assert found == {
        "x87", "64bit", "sse3", "sse4.1", "sse4.2", "crc32", "avx2", "lzcnt", "avx512f", "evex512",
        "avx512vnni", "avx512bf16",
    }  # fmt: skip
    arm = cpu_features.parse_cpuinfo(ARM, "aarch64")
    assert {"neon", "fp-armv8", "lse", "dotprod", "fullfp16", "i8mm", "bf16", "sve", "crc"} <= arm
    assert cpu_features.parse_cpuinfo(ARM, "riscv64") == frozenset()


def test_compares_with_what_a_program_needs() -> None:
    have = cpu_features.parse_cpuinfo(X86, "x86_64")
    needs = ["+avx2", "avx512vnni", "+avxvnni", "+pku", "-pku", "-amx-tile", "+prefetchi"]
    result = cpu_features.compare(needs, have, "x86_64")
    assert result.missing == ("avxvnni",)
    assert result.unchecked == ("prefetchi",)
    unknown = cpu_features.compare(["avx2"], frozenset(), "x86_64")
    assert unknown.missing == () and unknown.unchecked == ("avx2",)


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs Linux")
def test_agrees_with_the_compiler_about_this_machine(tmp_path: Path) -> None:
    """What LLVM says this CPU has, and the table knows, we find too; and the other way round."""
    import re
    import subprocess
    import sys

    if cpu_features.architecture() not in ("x86_64", "aarch64"):
        pytest.skip("no table for this architecture")
    source = tmp_path / "f.mlir"
    source.write_text("func.func @f(%a: tensor<4xf32>) -> tensor<4xf32> { return %a : tensor<4xf32> }")
    tool = Path(sys.executable).with_name("iree-compile")
    flags = ["--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=llvm-cpu"]
    phase = ["--iree-llvmcpu-target-cpu=host", "--compile-to=stream"]
    command = [tool, *flags, *phase, source]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    match = re.search(r'cpu_features = "([^"]*)"', printed)
    assert match is not None
    named = match[1].split(",")
    have = cpu_features.host_features()
    assert cpu_features.compare(named, have, cpu_features.architecture()).missing == ()
    absent = {name[1:] for name in named if name.startswith("-")} & have
    assert absent == set()


def test_what_linux_hides_is_not_looked_for() -> None:
    """LLVM finds shadow stacks by the CPU alone; Linux shows them where it uses them. No program needs to see them."""
    have = cpu_features.parse_cpuinfo("flags\t: fma avx2 user_shstk\n", "x86_64")
    for features in (have, have | {"shstk"}, frozenset({"fma", "avx2"})):
        found = cpu_features.compare(("+avx2", "+shstk", "+avx512f"), features, "x86_64")
        assert (found.missing, found.unchecked) == (("avx512f",), ("shstk",))


def test_missing_is_empty_for_what_this_machine_has() -> None:
    have = cpu_features.host_features()
    assert cpu_features.missing(sorted(have)) == ()
