"""A bundle appears whole or not at all; targets by name."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from halfbyte.errors import UsageError
from halfbyte.lowering.bundle import bundle_folder, run_line, write_flag_files
from halfbyte.lowering.targets.cpu import CpuTarget, names
from halfbyte.runtime.cpu_features import architecture, host_features
from halfbyte.runtime.manifest import EntryPoint, Manifest, Model, ParameterArchive, Program, Tensor


def test_a_bundle_appears_at_the_end(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with bundle_folder(out) as folder:
        (folder / "manifest.json").write_text("{}")
        assert not out.exists()
        assert folder.parent == out.parent
    assert [path.name for path in out.iterdir()] == ["manifest.json"]
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_crash_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), bundle_folder(tmp_path / "out") as folder:
        (folder / "manifest.json").write_text("{}")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_crash_keeps_the_old_bundle(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "manifest.json").write_text("old")
    with pytest.raises(ValueError, match="no"), bundle_folder(out) as folder:
        (folder / "manifest.json").write_text("new")
        raise ValueError("no")
    assert (out / "manifest.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_bundles_and_empty_folders_are_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for content in ("first", "second"):
        with bundle_folder(out) as folder:
            (folder / "manifest.json").write_text(content)
            (folder / content).touch()
        assert (out / "manifest.json").read_text() == content
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", "second"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("kind", ["file", "folder", "dangling link"])
def test_what_is_no_bundle_is_not_replaced(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("precious")
    elif kind == "folder":
        out.mkdir()
        (out / "precious").touch()
    else:
        out.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="the output exists and is not a bundle"), bundle_folder(out):
        raise AssertionError("not reached")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_flag_files(tmp_path: Path) -> None:
    cache = Tensor("k0", (2, 64, 16), "bf16")
    tokens, position = Tensor("tokens", ("T",), "i64"), Tensor("position", (1,), "i64")
    logits = Tensor("logits", (9,), "f32")
    manifest = Manifest(
        Model("llama", "bf16", 9, 64),
        (Program("cpu", "model.cpu.vmfb", "0" * 64, ("local-task", "local-sync")),),
        (ParameterArchive("model", "model.n64k8.irpa", "0" * 64, "n64k8", 1, ("cpu",), {}),),
        {
            "forward": EntryPoint((tokens,), (logits,)),
            "prefill": EntryPoint((tokens, position, cache), (logits,)),
        },
        (cache,),
    )
    write_flag_files(tmp_path, manifest)
    common = "--module=model.cpu.vmfb\n--parameters=model=model.n64k8.irpa\n--device=local-task\n"
    assert (tmp_path / "forward.flags").read_text() == common + "--function=forward\n"
    assert (tmp_path / "prefill.flags").read_text() == common + "--function=prefill\n--input=2x64x16xbf16=0\n"
    line = run_line(manifest, Path("out"))
    assert line == 'cd out && iree-run-module --input="4xi64=1" --flagfile=forward.flags'


# ---------------------------------------------------------------- targets


@pytest.mark.parametrize("name", names())
def test_every_named_cpu_is_a_target(name: str) -> None:
    target = CpuTarget.named(name)
    assert target.isa.needs <= target.features
    assert f"--iree-llvmcpu-target-cpu={target.llvm_cpu}" in target.flags
    asked = [flag for flag in target.flags if flag.startswith("--iree-llvmcpu-target-cpu-features=")]
    named = ",".join(f"+{feature}" for feature in target.llvm_features)
    assert asked == ([f"--iree-llvmcpu-target-cpu-features={named}"] if named else [])
    assert set(target.llvm_features) <= target.features
    if name != "host":
        assert target.architecture == ("aarch64" if name.startswith("aarch64") else "x86_64")
        assert f"--iree-llvmcpu-target-triple={target.architecture}-linux-gnu" in target.flags


def test_the_host_is_what_this_machine_has() -> None:
    target = CpuTarget.named("host")
    assert target.architecture == architecture()
    assert target.features <= host_features()
    assert target.isa.needs <= target.features
    assert json.dumps(sorted(target.features))


def test_levels_contain_each_other() -> None:
    levels = [
        CpuTarget.named(name).features
        for name in ("x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4", "avx512vnni", "avx512bf16", "amx")
    ]
    for lower, higher in itertools.pairwise(levels):
        assert lower < higher


def test_unknown_names_are_refused_with_those_known() -> None:
    with pytest.raises(UsageError) as error:
        CpuTarget.named("z80")
    assert error.value.exit_code == 2
    assert "found: z80" in str(error.value)
    assert all(name in str(error.value) for name in names())
