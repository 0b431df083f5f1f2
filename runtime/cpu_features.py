"""What instructions this machine's CPU has, in LLVM's names, to compare with what a program needs."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_ARCHITECTURES = {"amd64": "x86_64", "x86_64": "x86_64", "arm64": "aarch64", "aarch64": "aarch64"}

# Linux spells most features as LLVM does, apart from _ for - and .; these differ. "x:y z" means that the
# kernel's x stands for LLVM's y and z.
_X86_RENAMED = """
fpu:x87 lm:64bit pni:sse3 sse4_1:sse4.1 sse4_2:sse4.2,crc32 pclmulqdq:pclmul rdrand:rdrnd lahf_lm:sahf
abm:lzcnt 3dnowprefetch:prfchw bmi1:bmi sha_ni:sha avx512f:avx512f,evex512 avx_vnni:avxvnni
avx512_bf16:avx512bf16 avx512_vbmi2:avx512vbmi2 avx512_vnni:avx512vnni avx512_bitalg:avx512bitalg
avx512_vpopcntdq:avx512vpopcntdq avx512_fp16:avx512fp16 avx512_vp2intersect:avx512vp2intersect
amx_bf16:amx-bf16 amx_tile:amx-tile amx_int8:amx-int8 amx_fp16:amx-fp16 amx_complex:amx-complex
avx_ifma:avxifma avx_vnni_int8:avxvnniint8 avx_vnni_int16:avxvnniint16 avx_ne_convert:avxneconvert
"""
_X86_SAME = """
cx8 cmov mmx fxsr sse sse2 ssse3 fma cx16 movbe popcnt aes xsave avx f16c sse4a xop fma4 tbm lwp fsgsbase avx2
bmi2 rtm avx512dq rdseed adx avx512ifma clflushopt clwb avx512cd avx512bw avx512vl xsaveopt xsavec xsaves
avx512vbmi pku gfni vaes vpclmulqdq rdpid cldemote movdiri movdir64b enqcmd serialize tsxldtrk waitpkg
wbnoinvd clzero invpcid hreset cmpccxadd sha512 sm3 sm4 rdpru mwaitx
"""
_ARM_RENAMED = """
fp:fp-armv8 asimd:neon sha1:sha2 sha2:sha2 crc32:crc atomics:lse asimdhp:fullfp16 asimdrdm:rdm jscvt:jsconv
fcma:complxnum lrcpc:rcpc ilrcpc:rcpc-immo dcpop:ccpp dcpodp:ccdp asimddp:dotprod sha512:sha3 asimdfhm:fp16fml
paca:pauth rng:rand svei8mm:i8mm svebf16:bf16 svef32mm:f32mm svef64mm:f64mm sveaes:sve2-aes,sve-aes
svebitperm:sve2-bitperm,sve-bitperm svesha3:sve2-sha3,sve-sha3 svesm4:sve2-sm4,sve-sm4 flagm2:altnzcv
frint:fptoint smei16i64:sme-i16i64 smef64f64:sme-f64f64
"""
_ARM_SAME = "aes sha3 sm4 sve sve2 dit flagm ssbs sb i8mm bf16 bti mte sme sme2 mops hbc cssc lse128"


def _names(renamed: str, same: str) -> dict[str, tuple[str, ...]]:
    table: dict[str, tuple[str, ...]] = {name: (name,) for name in same.split()}
    for row in renamed.split():
        kernel, _, llvm = row.partition(":")
        table[kernel] = tuple(llvm.split(","))
    return table


_TABLES = {"x86_64": _names(_X86_RENAMED, _X86_SAME), "aarch64": _names(_ARM_RENAMED, _ARM_SAME)}


@dataclass(frozen=True)
class Comparison:
    """What a program needs against what a CPU has.

    Attributes:
        missing: features the CPU lacks.
        unchecked: features this module cannot look up on this system.
    """

    missing: tuple[str, ...]
    unchecked: tuple[str, ...]


def architecture() -> str:
    """Returns ``x86_64`` or ``aarch64``, or what `platform.machine` calls any other."""
    machine = platform.machine().lower()
    return _ARCHITECTURES.get(machine, machine)


def parse_cpuinfo(text: str, arch: str) -> frozenset[str]:
    """Returns the features that a Linux /proc/cpuinfo lists, in LLVM's names.

    Args:
        text: content of /proc/cpuinfo. Only features that all its CPUs have count.
        arch: ``x86_64`` or ``aarch64``; the result is empty for any other.
    """
    table = _TABLES.get(arch, {})
    label = "flags" if arch == "x86_64" else "Features"
    cpus = [
        {llvm for flag in line.partition(":")[2].split() for llvm in table.get(flag, ())}
        for line in text.splitlines()
        if line.partition(":")[0].strip() == label
    ]
    return frozenset(set.intersection(*cpus)) if cpus else frozenset()


@lru_cache(maxsize=1)
def host_features() -> frozenset[str]:
    """Returns this machine's CPU features in LLVM's names; empty where unknown (not on Linux)."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    return parse_cpuinfo(text, architecture())


def compare(features: Iterable[str], have: frozenset[str], arch: str) -> Comparison:
    """Compares what a program needs with what a CPU has.

    Args:
        features: LLVM's names, with or without a leading ``+``; a leading ``-`` takes back an earlier one.
        have: what the CPU has, from `host_features` or `parse_cpuinfo`. Empty means unknown.
        arch: architecture of both.
    """
    wanted = {feature.lstrip("+-"): not feature.startswith("-") for feature in features}
    needed = [feature for feature, on in wanted.items() if on]
    known = {llvm for names in _TABLES.get(arch, {}).values() for llvm in names} if have else set()
    return Comparison(
        missing=tuple(feature for feature in needed if feature in known and feature not in have),
        unchecked=tuple(feature for feature in needed if feature not in known),
    )


def missing(features: Iterable[str]) -> tuple[str, ...]:
    """Returns those of ``features`` (LLVM's names) that this machine is known to lack."""
    return compare(features, host_features(), architecture()).missing
