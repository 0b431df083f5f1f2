"""Whole decoders on Vulkan: logits, caches, and the same archive as the CPU's program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from vulkan_device import no_vulkan

import halfbyte
from halfbyte.runtime import Bundle, Conversation
from halfbyte.runtime.logits import all_logits
from halfbyte.verify_model import verify

Compile = Callable[..., Path]
# Every way of attention and of layers: grouped heads, q/k norms, shared heads, act-order, experts, latent attention.
# Those that ask for quantized activations are compared without them.
MODELS = (
    "llama-gptq-v2-asym-g32",
    "qwen2-gptq-v1-actorder-g32",
    "qwen3-autoround-awq-asym-g64",
    "llama-gguf-q4_1",
    "llama-ct-fp8-block",
    "qwen3moe-ct-w4a8",
    "deepseek-w4afp8",
)


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    if no_vulkan():
        pytest.skip(no_vulkan())
    return str(request.param)


@pytest.fixture(scope="module")
def bundle(name: str, compiled: Compile) -> Bundle:
    return halfbyte.load(compiled(name, target="vulkan", activations="none"), device="vulkan")


def test_logits_are_those_of_the_float_model(bundle: Bundle, name: str, checkpoints: Path) -> None:
    values = load_file(checkpoints / name / "expected.safetensors")
    tokens, logits = [int(token) for token in values["tokens"]], values["logits"]
    got = all_logits(bundle, tokens)
    largest = np.abs(logits).max()
    assert np.abs(got - logits).max() <= 2e-4 * largest
    conversation = Conversation(bundle)
    rows = [conversation.prefill(tokens[:4])]
    rows += [conversation.step(token) for token in tokens[4:]]
    np.testing.assert_allclose(np.stack(rows), got[3:], atol=2e-5 * largest, rtol=0)
    again = Conversation(bundle, chunk=3).prefill(tokens)
    np.testing.assert_allclose(again, got[-1], atol=2e-5 * largest, rtol=0)


def test_one_archive_serves_both_targets(compiled: Compile) -> None:
    """With int8 activations too: a code may fall on the other side of a tie, so logits are near, not equal."""
    if no_vulkan():
        pytest.skip(no_vulkan())
    folder = compiled("base-ct-w4a8", target="cpu,vulkan")
    on_cpu, on_vulkan = (halfbyte.load(folder, device=device) for device in ("cpu", "vulkan"))
    [archive] = on_cpu.manifest.parameters
    assert archive.targets == ("cpu", "vulkan")
    tokens = list(range(3, 20))
    want, got = all_logits(on_cpu, tokens), all_logits(on_vulkan, tokens)
    assert np.abs(got - want).max() <= 0.03 * np.abs(want).max()
    assert {layer.activations for layer in on_vulkan.manifest.layers} >= {"int8"}


def test_verify_knows_what_a_gpu_promises(compiled: Compile, checkpoints: Path) -> None:
    if no_vulkan():
        pytest.skip(no_vulkan())
    name = "llama-gptq-v2-asym-g32"
    folder = compiled(name, target="vulkan", activations="none")
    found = verify(folder, checkpoints / name, device="vulkan")
    assert not found.failures and {check.limit for check in found.layers} == {1e-6}
