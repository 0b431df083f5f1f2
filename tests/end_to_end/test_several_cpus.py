"""One bundle for several CPUs: a program each, one archive, and the best that the machine can run is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import halfbyte
from halfbyte.errors import DeviceError
from halfbyte.lowering.targets.cpu import CpuTarget
from halfbyte.runtime import cpu_features
from halfbyte.runtime.device import open_device
from halfbyte.runtime.logits import all_logits
from halfbyte.runtime.program import choose_program

Compile = Callable[..., Path]
CPUS = ("x86-64", "x86-64-v3", "host")


@pytest.fixture(scope="module")
def folder(compiled: Compile) -> Path:
    if cpu_features.architecture() != "x86_64":
        pytest.skip("this is no x86_64")
    return compiled("llama-gguf-q4_1", cpu=",".join(CPUS), activations="int8")


def test_a_program_each_and_one_archive(folder: Path) -> None:
    manifest = halfbyte.load(folder).manifest
    assert {program.cpu for program in manifest.programs} == set(CPUS)
    assert {program.file for program in manifest.programs} == {f"model.cpu-{cpu}.vmfb" for cpu in CPUS}
    assert len(manifest.parameters) == 1
    kernels = {program.cpu: CpuTarget.named(program.cpu).isa.name for program in manifest.programs}
    assert len(set(kernels.values())) >= 2


def test_the_best_that_runs_is_chosen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, device = halfbyte.load(folder).manifest, open_device("cpu")
    assert choose_program(device, manifest).cpu == "host"
    for features, chosen in ((CpuTarget.named("x86-64-v3").features, "x86-64-v3"), ({"sse2"}, "x86-64")):
        monkeypatch.setattr(cpu_features, "host_features", lambda have=features: frozenset(have))
        assert choose_program(device, manifest).cpu == chosen


def test_none_that_runs_is_an_error(compiled: Compile, monkeypatch: pytest.MonkeyPatch) -> None:
    if cpu_features.architecture() != "x86_64":
        pytest.skip("this is no x86_64")
    path = compiled("llama-gguf-q4_1", cpu="x86-64-v3", activations="int8")
    monkeypatch.setattr(cpu_features, "host_features", lambda: frozenset({"sse4.2"}))
    with pytest.raises(DeviceError, match="avx2"):
        halfbyte.load(path)


def test_every_program_computes_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [1, 5, 17, 40, 3, 99]
    host = all_logits(halfbyte.load(folder), tokens)
    monkeypatch.setattr(cpu_features, "host_features", lambda: frozenset({"sse2"}))
    plain = all_logits(halfbyte.load(folder), tokens)
    # The linears agree to the bit; attention and norms are the compiler's, and int8 makes more of their roundings.
    assert np.abs(host - plain).max() <= 5e-2 * np.abs(host).max()
