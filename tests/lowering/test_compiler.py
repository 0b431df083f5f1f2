"""iree-compile: the cache, diagnostics, what is kept to repeat a failure."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
import test_fp8_moe_kernels as fp8_experts
from kernel_cases import CASES

from halfbyte.errors import CompilerError
from halfbyte.lowering import compiler
from halfbyte.lowering.cache import cache_folder
from halfbyte.lowering.compiler import compile_module
from halfbyte.lowering.layer_program import ArchivedLayer, layer_program
from halfbyte.lowering.targets.cpu import CpuTarget

FLAGS = tuple(CpuTarget.named("host").flags)


def module(number: int) -> str:
    return f"func.func @f(%x: tensor<2xf32>) -> tensor<2xf32> {{\n  %c = arith.constant dense<{number}.0> : tensor<2xf32>\n  %y = arith.addf %x, %c : tensor<2xf32>\n  return %y : tensor<2xf32>\n}}\n"  # noqa: E501


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_programs_are_kept_by_content(own_cache: Path) -> None:
    first, hit = compile_module(module(1), FLAGS)
    assert not hit and cache_folder() == own_cache
    assert compile_module(module(1), FLAGS) == (first, True)
    assert compile_module(module(2), FLAGS)[1] is False
    assert compile_module(module(1), FLAGS, host="another")[1] is False
    assert compile_module(module(1), (*FLAGS, "--iree-opt-level=O1"))[1] is False
    assert compile_module(module(1), FLAGS)[1] is True
    assert compile_module(module(1), FLAGS, cache=False)[1] is False
    kept = sorted(path.suffix for path in own_cache.iterdir())
    assert kept.count(".vmfb") == 4
    assert set(kept) <= {".vmfb", ".lock"}


def test_a_new_compiler_compiles_again(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_module(module(3), FLAGS)
    monkeypatch.setattr(compiler, "version", lambda name: "99.0")
    assert compile_module(module(3), FLAGS)[1] is False


def test_failures_say_what_the_compiler_said(own_cache: Path, tmp_path: Path) -> None:
    kept = tmp_path / "dump"
    with pytest.raises(CompilerError) as error:
        compile_module("func.func @f() {\n  this is no operation\n}\n", FLAGS, dump_dir=kept)
    assert error.value.exit_code == 5
    assert "module.mlir:2:3: error:" in str(error.value)
    assert str(kept) in str(error.value)
    assert (kept / "module.mlir").read_text().startswith("func.func @f()")
    assert "error:" in (kept / "diagnostics.txt").read_text()
    assert not list(own_cache.glob("*.vmfb"))


def test_a_failure_without_a_folder_makes_one(own_cache: Path) -> None:
    with pytest.raises(CompilerError) as error:
        compile_module(module(4), [*FLAGS, "--no-such-flag"])
    assert "--no-such-flag" in str(error.value)
    kept = Path(str(error.value).rpartition(" ")[2])
    assert sorted(path.name for path in kept.iterdir()) == ["compile.sh", "diagnostics.txt", "module.mlir"]
    assert "--no-such-flag" in (kept / "compile.sh").read_text()


def test_the_kept_command_repeats_the_compilation(own_cache: Path, tmp_path: Path) -> None:
    kept = tmp_path / "dump"
    made, _ = compile_module(module(5), FLAGS, dump_dir=kept)
    assert sorted(path.name for path in kept.iterdir()) == ["compile.sh", "module.mlir"]
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    command = ["sh", str(kept / "compile.sh")]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PATH": path}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (kept / "module.vmfb").stat().st_size > len(made) / 2


def test_flags_of_the_environment_count(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_module(module(6), FLAGS)
    monkeypatch.setenv("HALFBYTE_IREE_FLAGS", "--iree-opt-level=O1 '--no-such-flag=a b'")
    with pytest.raises(CompilerError, match="--no-such-flag=a b"):
        compile_module(module(6), FLAGS)


def test_verification_between_passes_changes_no_program(tmp_path: Path) -> None:
    """All other tests compile without it, conftest.py says why. The file's name is in the program."""
    target = CpuTarget.named("x86-64-v3")
    case, fp8 = CASES["min_tokens_3"], fp8_experts.CASES[-1]
    layers = [ArchivedLayer("linear", case.linear(target.isa, target))]
    layers += [ArchivedLayer("experts", fp8.kernels(target))]
    (tmp_path / "module.mlir").write_text(layer_program(layers))
    tool = Path(sysconfig.get_path("scripts")) / "iree-compile"
    for verify in ("true", "false"):
        command = [tool, "module.mlir", *target.flags, f"--verify={verify}", "-o", f"{verify}.vmfb"]
        subprocess.run(command, cwd=tmp_path, check=True)
    assert (tmp_path / "true.vmfb").read_bytes() == (tmp_path / "false.vmfb").read_bytes()


def test_what_the_compiler_is_given_is_always_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = module(7).replace("%y = arith.addf %x, %c :", "%y = tensor.cast %x : tensor<2xf32> to")
    wrong = wrong.replace(
        "to tensor<2xf32>\n  return %y : tensor<2xf32>", "to tensor<3xf32>\n  return %x : tensor<2xf32>"
    )
    monkeypatch.setenv("HALFBYTE_IREE_FLAGS", "--verify=false")
    with pytest.raises(CompilerError, match=r"module\.mlir:3:.*cast"):
        compile_module(wrong, FLAGS, cache=False)
