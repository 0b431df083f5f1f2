"""One bundle for several kinds of devices: a program each, one archive, and none runs what it cannot."""

from __future__ import annotations

import json
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from dequantizing_models import GroupedLinear
from random_layers import random_activations, random_weight
from rewritten_graphs import Named, export
from safetensors.numpy import load_file
from vulkan_device import far_rows, no_vulkan

import halfbyte
from halfbyte.errors import DeviceError
from halfbyte.lowering.targets.vulkan import VulkanTarget
from halfbyte.runtime import Conversation
from halfbyte.runtime.logits import all_logits
from halfbyte.runtime.sampling import Sampler
from halfbyte.runtime.vulkan_features import device_features

Compile = Callable[..., Path]
TOKENS = [1, 5, 17, 40, 3, 99, 20, 7]


@pytest.fixture(scope="module")
def folder(compiled: Compile) -> Path:
    if no_vulkan():
        pytest.skip(no_vulkan())
    return compiled("llama-gguf-q4_1", target="cpu,vulkan,cuda", sample="program")


def test_a_program_each_and_one_archive(folder: Path) -> None:
    manifest = halfbyte.load(folder).manifest
    assert [(program.target, program.file) for program in manifest.programs] == [
        ("cpu", "model.cpu.vmfb"),
        ("vulkan", "model.vulkan.vmfb"),
        ("cuda", "model.cuda.vmfb"),
    ]
    [archive] = manifest.parameters
    assert archive.targets == ("cpu", "vulkan", "cuda")


def test_all_targets_are_fused(folder: Path) -> None:
    """They share graphs."""
    fused = json.loads((folder / "report.json").read_text())["fused"]
    parts = {name.rpartition(".")[2]: what for name, what in fused.items()}
    assert len(fused) == 2 * 4 + 1 and parts == {
        "q_proj+k_proj+v_proj": "RMSNorm before",
        "o_proj": "residual added after",
        "gate_proj+up_proj": "RMSNorm before, SwiGLU after",
        "down_proj": "residual added after",
        "lm_head": "RMSNorm before",
    }


def test_logits_are_transformers(folder: Path, checkpoints: Path) -> None:
    values = load_file(checkpoints / "llama-gguf-q4_1" / "expected.safetensors")
    tokens, logits = [int(token) for token in values["tokens"]], values["logits"]
    for device in ("cpu", "vulkan"):
        got = all_logits(halfbyte.load(folder, device=device), tokens)
        assert np.abs(got - logits).max() <= 2e-4 * np.abs(logits).max()


def test_devices_agree(folder: Path) -> None:
    cpu, gpu = halfbyte.load(folder), halfbyte.load(folder, device="vulkan")
    assert gpu.device.target == "vulkan" and cpu.device.target == "cpu"
    assert not far_rows(all_logits(gpu, TOKENS), all_logits(cpu, TOKENS), 1e-4)
    texts = [list(halfbyte.runtime.generate(bundle, TOKENS[:3], max_tokens=20)) for bundle in (cpu, gpu)]
    assert len(texts[0]) > 1 and texts[0] == texts[1]
    conversation = Conversation(gpu)
    assert conversation.samples
    likely = set(np.argsort(-conversation.prefill(TOKENS))[:3].tolist())
    for seed in range(5):
        sampler = Sampler(temperature=9.0, top_k=3, seed=seed)
        assert Conversation(gpu).next_token(TOKENS, sampler) in likely


def test_iree_run_module_runs_the_program_of_a_device(folder: Path, tmp_path: Path) -> None:
    tool = Path(sysconfig.get_path("scripts")) / "iree-run-module"
    values = f"--input={len(TOKENS)}xi64={','.join(map(str, TOKENS))}"
    command = [tool, values, "--flagfile=forward.vulkan.flags", f"--output=@{tmp_path / 'y.npy'}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [want] = halfbyte.load(folder, device="vulkan").call("forward", np.array(TOKENS))
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), want)
    assert "--device=cuda\n" in (folder / "forward.cuda.flags").read_text()


def test_one_file_for_all_of_them(folder: Path, compiled: Compile, tmp_path: Path) -> None:
    """The same code as in files of their own, to the bit."""
    fat = compiled("llama-gguf-q4_1", target="cpu,vulkan,cuda", fat=True, sample="program")
    manifest = halfbyte.load(fat).manifest
    assert [(p.target, p.file) for p in manifest.programs] == [
        (target, "model.vmfb") for target in ("cpu", "vulkan", "cuda")
    ]
    assert [path.name for path in fat.glob("*.vmfb")] == ["model.vmfb"]
    for device in ("local-task", "local-sync", "vulkan"):
        one, other = halfbyte.load(fat, device=device), halfbyte.load(folder, device=device)
        np.testing.assert_array_equal(all_logits(one, TOKENS), all_logits(other, TOKENS))
        texts = [list(halfbyte.runtime.generate(bundle, TOKENS[:3], max_tokens=9)) for bundle in (one, other)]
        assert texts[0] == texts[1]
    tool = Path(sysconfig.get_path("scripts")) / "iree-run-module"
    values = f"--input={len(TOKENS)}xi64={','.join(map(str, TOKENS))}"
    for flags, device in (("forward.flags", "cpu"), ("forward.vulkan.flags", "vulkan")):
        command = [tool, values, f"--flagfile={flags}", f"--output=@{tmp_path / 'y.npy'}"]
        subprocess.run(command, cwd=fat, capture_output=True, check=True)
        [want] = halfbyte.load(folder, device=device).call("forward", np.array(TOKENS))
        np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), want)


# ---------------------------------------------------------------- refusals


@pytest.fixture(scope="module")
def graph() -> torch.export.ExportedProgram:
    weight = random_weight(1, 24, 64, 32)
    return export(Named(layer=GroupedLinear(weight)), random_activations(1, 5, 64))


def test_a_bundle_without_a_program_for_the_device(
    graph: torch.export.ExportedProgram, tmp_path: Path
) -> None:
    if no_vulkan():
        pytest.skip(no_vulkan())
    options = halfbyte.CompileOptions(target="cuda")
    made = halfbyte.compile(graph, tmp_path / "out", options)
    for device, target in (("vulkan", "vulkan"), ("cpu", "cpu")):
        with pytest.raises(
            DeviceError,
            match=rf"no program for this device(.|\n)*found: cuda\n(.|\n)*halfbyte compile --target {target}",
        ):
            halfbyte.load(made.path, device=device)


def test_a_device_that_lacks_something_runs_nothing(
    graph: torch.export.ExportedProgram, tmp_path: Path
) -> None:
    """Code for other sizes of subgroups would run, and sum wrongly."""
    if no_vulkan():
        pytest.skip(no_vulkan())
    have, other = device_features(""), {}
    for name in ("ampere", "adreno", "llvmpipe"):
        other |= {name: VulkanTarget.named(name).features - have}
    name, missing = next((name, features) for name, features in other.items() if features)
    assert len(missing) == 1
    alone = halfbyte.CompileOptions(target="vulkan", vulkan_target=name)
    made = halfbyte.compile(graph, tmp_path / "alone", alone)
    with pytest.raises(
        DeviceError,
        match=rf"lacks features of {name}(.|\n)*found: no {next(iter(missing))}\n(.|\n)*--vulkan-target portable",
    ):
        halfbyte.load(made.path, device="vulkan")
    both = halfbyte.CompileOptions(target="cpu,vulkan", vulkan_target=f"{name},portable")
    path = halfbyte.compile(graph, tmp_path / "both", both).path
    x = random_activations(3, 9, 64)
    results = [halfbyte.load(path, device=device).call("forward", x)[0] for device in ("cpu", "vulkan")]
    assert not far_rows(results[1], results[0])


def test_a_program_is_compiled_twice_alike(graph: torch.export.ExportedProgram, tmp_path: Path) -> None:
    """The second time its linears are halfbyte's own operators already, of a weight without bias."""
    x, results = random_activations(3, 9, 64), []
    for name in ("first", "second"):
        path = halfbyte.compile(graph, tmp_path / name).path
        results.append(halfbyte.load(path).call("forward", x)[0])
    np.testing.assert_array_equal(results[0], results[1])
