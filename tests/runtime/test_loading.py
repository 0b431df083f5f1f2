"""Bundles that cannot run here, or are damaged, and what loading says about them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halfbyte.errors import CheckpointError, DeviceError
from halfbyte.runtime import cpu_features, load
from halfbyte.runtime.manifest import EntryPoint, Manifest, Program


def _rewrite(folder: Path, **fields: Any) -> None:
    manifest = Manifest.load(folder)
    if "program" in fields:
        fields["programs"] = (replace(manifest.programs[0], **fields.pop("program")),)
    (folder / "manifest.json").write_text(json.dumps(replace(manifest, **fields).to_json()))


def test_cpu_without_the_instructions_is_refused_before_the_program_is_read(copied_bundle: Path) -> None:
    (copied_bundle / "model.cpu.vmfb").unlink()
    known = ("sse4a", "xop", "amx-fp16", "avx512f", "sme2", "mte", "sve")  # no CPU has all of them
    compared = cpu_features.compare(known, cpu_features.host_features(), cpu_features.architecture())
    if not compared.missing:
        pytest.skip("this system does not tell its CPU features")
    feature = compared.missing[0]
    _rewrite(copied_bundle, program={"features": (feature,)})
    with pytest.raises(
        DeviceError, match=rf"lacks instructions(.|\n)*no {feature}(.|\n)*halfbyte compile --cpu"
    ):
        load(copied_bundle)
    _rewrite(copied_bundle, program={"features": (), "architecture": "riscv_64"})
    with pytest.raises(DeviceError, match="for another architecture"):
        load(copied_bundle)


def test_takes_the_program_this_cpu_can_run(copied_bundle: Path) -> None:
    manifest = Manifest.load(copied_bundle)
    other = Program("cpu", "none.vmfb", "0" * 64, ("local-task",), "riscv_64", "other", ("v",))
    _rewrite(copied_bundle, programs=(other, *manifest.programs))
    assert load(copied_bundle, device="local-task").call("forward", np.array([1]))


def test_bundle_without_a_program_for_the_device(copied_bundle: Path) -> None:
    _rewrite(copied_bundle, program={"drivers": ("vulkan",), "target": "vulkan"})
    with pytest.raises(
        DeviceError, match=r"no program for this device(.|\n)*found: vulkan(.|\n)*--target cpu"
    ):
        load(copied_bundle)


def test_damaged_programs_are_refused(copied_bundle: Path) -> None:
    path = copied_bundle / "model.cpu.vmfb"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match="not the one the manifest names"):
        load(copied_bundle)
    path.write_bytes(b"nonsense")
    _rewrite(copied_bundle, program={"sha256": hashlib.sha256(b"nonsense").hexdigest()})
    with pytest.raises(DeviceError, match="the program cannot be loaded"):
        load(copied_bundle)
    path.unlink()
    with pytest.raises(CheckpointError, match="missing program"):
        load(copied_bundle)


def test_manifest_and_program_must_agree(copied_bundle: Path) -> None:
    manifest = Manifest.load(copied_bundle)
    points = dict(manifest.entry_points)
    tokens = points["forward"].inputs[0]
    _rewrite(copied_bundle, entry_points={**points, "forward": EntryPoint((tokens, tokens), ())})
    with pytest.raises(CheckpointError, match="disagree on the number of inputs"):
        load(copied_bundle)
    _rewrite(copied_bundle, entry_points={**points, "main": EntryPoint((), ())})
    with pytest.raises(CheckpointError, match=r"main: the program lacks an entry point(.|\n)*prefill"):
        load(copied_bundle)


def test_other_compiler_versions_are_noted(copied_bundle: Path, decoder_bundle: Path) -> None:
    assert load(decoder_bundle).notes == ()
    _rewrite(copied_bundle, versions={"iree-base-compiler": "3.1.0"})
    bundle = load(copied_bundle)
    assert "compiled by iree-base-compiler 3.1.0" in bundle.notes[0]
    assert bundle.notes[0] in bundle.describe()
