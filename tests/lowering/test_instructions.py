"""The machine code of every body, compiled here for each CPU whether or not this machine could run it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from layer_bundles import Case
from random_layers import random_weight
from test_attention_kernels import CASES, export

import halfbyte
from halfbyte.lowering.compiler import compile_module
from halfbyte.lowering.layer_program import ArchivedLayer, layer_program
from halfbyte.lowering.targets.cpu import CpuTarget
from halfbyte.passes.program import Program

# CPU -> its inner product as assembly, on its widest registers, and those of the others.
INNER = {
    "amx": r"\ttdpbs[su]d\t",
    "avx512vnni": r"\tvpdpbusd\t.*%zmm",
    "x86-64-v4": r"\tvpmadd(?:ubsw|wd)\t.*%zmm",
    "avxvnni": r"\{vex\}\s+vpdpbusd\t.*%ymm",
    "x86-64-v3": r"\tvpmadd(?:ubsw|wd)\t.*%ymm",
    "aarch64-i8mm": r"\tusmmla\t.*v[0-9]+\.4s",
    "aarch64-dotprod": r"\tsdot\t.*v[0-9]+\.4s",
}
# The same of an entry of a table.
LOOK_UP = {
    **dict.fromkeys(("amx", "avx512vnni", "x86-64-v4"), r"\tvpshufb\t.*%zmm"),
    **dict.fromkeys(("avxvnni", "x86-64-v3"), r"\tvpshufb\t.*%ymm"),
    **dict.fromkeys(("aarch64-i8mm", "aarch64-dotprod"), r"\ttbl\t.*16b"),
}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("cpu", INNER)
def test_the_inner_product_is_the_cpus(cpu: str, bits: int, tmp_path: Path) -> None:
    """Also of asymmetric weights, case 17: zero points do not make the product one of floats."""
    target, layers = CpuTarget.named(cpu), []
    for name, digits in (("int8", 1), ("planes", 3)):
        weight = random_weight(digits, 256, 512, 128, "integer", "f16", bits=bits)
        layers.append(ArchivedLayer(name, Case(name, weight, "f32", digits).linear(target.isa, target)))
    if bits == 4:
        weight = random_weight(3, 256, 512, 32, "symmetric", "bf16", levels="e2m1")
        layers.append(ArchivedLayer("table", Case("table", weight, "f32", 1).linear(target.isa, target)))
    files = f"--iree-hal-dump-executable-intermediates-to={tmp_path}"
    compile_module(layer_program(layers), [*target.flags, files], cache=False)
    text = "\n".join(path.read_text() for path in tmp_path.glob("*.s"))
    found = {name: len(re.findall(pattern, text)) for name, pattern in INNER.items()}
    # At least a tile of four rows and a step of eight inputs, in each of two modes and forms; of tile registers
    # the 16 pairs of digit and columns.
    assert found.pop(cpu) >= (16 if cpu == "amx" else 65)
    if bits == 4:
        assert len(re.findall(LOOK_UP[cpu], text)) >= 8
    if cpu == "amx":
        assert found.pop("avx512vnni") >= 33, "few rows go without tiles"
        assert ("tdpbsud" in text) == (bits == 8), "4-bit weights are signed bytes by then"
    assert not any(found.values()) or cpu in ("avx512vnni", "avxvnni")


# CPU -> what multiplies e4m3 weights.
FLOATS = {
    "amx": r"\ttdpbf16ps\t",
    "avx512bf16": r"\tvdpbf16ps\t.*%zmm",
    "x86-64-v4": r"\tvfmadd\w+ps\t.*%zmm",
    "x86-64-v3": r"\tvfmadd\w+ps\t.*%ymm",
}


@pytest.mark.parametrize("cpu", FLOATS)
def test_e4m3_weights_take_the_widest_float_unit(cpu: str, tmp_path: Path) -> None:
    target = CpuTarget.named(cpu)
    layer = ArchivedLayer("fp8", target.fp8_linear(256, 512, 128, "f32", False, True))
    files = f"--iree-hal-dump-executable-intermediates-to={tmp_path}"
    compile_module(layer_program([layer]), [*target.flags, files], cache=False)
    text = "\n".join(path.read_text() for path in tmp_path.glob("*.s"))
    assert len(re.findall(FLOATS[cpu], text)) >= 4
    better = list(FLOATS)[: list(FLOATS).index(cpu)]
    assert not [name for name in better if re.search(FLOATS[name], text)]


@pytest.mark.parametrize("cpu", ["x86-64", "aarch64"])
def test_plain_kernels_use_none_of_them(cpu: str, tmp_path: Path) -> None:
    target = CpuTarget.named(cpu)
    weight = random_weight(1, 64, 128, 64, "symmetric", "f16")
    layer = ArchivedLayer("plain", Case("plain", weight, "f32", 1).linear(target.isa, target))
    files = f"--iree-hal-dump-executable-intermediates-to={tmp_path}"
    compile_module(layer_program([layer]), [*target.flags, files], cache=False)
    text = "\n".join(path.read_text() for path in tmp_path.glob("*.s"))
    assert len(text) > 1000
    assert not re.findall(r"vpdpbusd|vpmaddubsw|\tsdot\t|%[yz]mm", text)


# How caches of a dtype become float32 on aarch64.
WIDENED = {"f32": None, "f16": r"\tfcvtl2?\t.*\.4s", "bf16": r"\tu?shll2?\t.*\.4s"}


def test_attention_takes_neon_on_aarch64(tmp_path: Path) -> None:
    """Kernels of many tokens and of one, over caches of every dtype: fused, four lanes at a time, nothing called."""
    entries = {name: export(CASES[name], None) for name in ("smol", "half", "small", "brain")}
    program = Program(entries | {"one": export(CASES["smol"], 1)})
    files = (f"--iree-hal-dump-executable-intermediates-to={tmp_path}",)
    options = halfbyte.CompileOptions(cpu="aarch64", cache=False, iree_flags=files)
    halfbyte.compile(program, tmp_path / "bundle", options)
    [path] = tmp_path.glob("*.s")
    functions = re.finditer(r"^(halfbyte_\w+):\n(.*?)^\.Lfunc_end", path.read_text(), re.M | re.S)
    code = {found[1]: found[2] for found in functions}
    kinds = [re.sub(r"halfbyte_(attention_one|attention|rotate_append|kv_append)_.*", r"\1", n) for n in code]
    want = ["attention"] * 4 + ["attention_one", "kv_append"] + ["rotate_append"] * 3
    assert sorted(kinds) == want
    for name, text in code.items():
        assert not re.search(r"\t(?:bl|blr)\t|\tf(?:mul|add|madd|sub)\t[sh][0-9]", text), name
        fused = len(re.findall(r"\tfml[as]\t.*\.4s", text))
        # At least a tile of four rows and as many vectors, twice: scores and values.
        assert fused >= (32 if "_attention" in name else 8 if "_rotate" in name else 0), name
        cache = name.rpartition("_")[2]
        if "_attention" in name:
            for dtype, pattern in WIDENED.items():
                assert pattern is None or (len(re.findall(pattern, text)) >= 16) == (dtype == cache), name
