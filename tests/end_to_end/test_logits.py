"""Checkpoints by the tools people use, compiled and run: logits, conversations, the plain IREE tool."""

from __future__ import annotations

import json
import subprocess
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from slow import slow

import halfbyte
from halfbyte.runtime import Bundle, Conversation
from halfbyte.runtime.logits import all_logits

Compile = Callable[..., Path]
# Checkpoints, and whether they are compiled for an older CPU, whose kernels have another body.
MODELS = {
    "llama-gptq-v1-sym-g64": True,
    "llama-gptq-v2-asym-g32": False,
    "qwen2-gptq-v1-actorder-g32": False,
    "qwen3-gptq-dynamic": True,
    "llama-autogptq-channelwise": True,
    "llama-autoround-gptq-sym-g32": True,
    "llama-autoround-mixed-bits": True,
    "llama-autoround-zeros-as-stored": True,
    "qwen2-awq-asym-g32": True,
    "qwen3-autoround-awq-asym-g64": False,
    "llama-torchao-int4-asym-g32": True,
    "llama-torchao-classes": False,
    "llama-hqq-int4-g32": True,
    "llama-gguf-q4_0": True,
    "llama-gguf-q4_1": False,
    "base-gptq": False,
    "base-ct-w4a8": True,
    "llama-ct-w4a16-g128": False,
    "qwen2-ct-w4a16-asym-sharded": True,
    "qwen3-ct-w4a8-channel": False,
    "llama-ct-fp8-block": True,
    "qwen3-ct-fp8-dynamic": False,
    "mixtral-ct-w4a16-sharded": True,
    "qwen3moe-ct-w4a8": False,
    "qwen3moe-autoround-g32": True,
    "deepseek-w4afp8": False,
    "llama-ct-nvfp4": False,
    "llama-ct-mxfp4": True,
}
# Those of which a compiler sees nothing that it does not see of another: the family, with the bits, the zero points and
# the dtype of scales. Readers differ, but tests/checkpoints compares each one's weights to the bit, and its logits.
ALIKE = (
    "llama-autoround-gptq-sym-g32",
    "base-gptq",
    "llama-autoround-zeros-as-stored",
    "llama-ct-w4a16-g128",
    "llama-hqq-int4-g32",
    "qwen2-awq-asym-g32",
    "llama-ct-mxfp4",
)
# Checkpoints that ask for quantized activations, and for which.
ASKING = {
    "base-ct-w4a8": {"int8"},
    "qwen3-ct-w4a8-channel": {"int8"},
    "llama-ct-w4a8-packed-g32": {"int8"},
    "llama-ct-w4a8-int-quantized": {"int8"},
    "llama-ct-w4afp8": {"fp8"},
    "llama-ct-fp8-block": {"fp8"},
    "qwen3-ct-fp8-dynamic": {"fp8"},
    "qwen3moe-ct-w4a8": {"int8"},
    "deepseek-w4afp8": {"fp8"},
    "llama-ct-static-int8": {"int8_fixed", "int8_affine_f32"},
}
V2, Q4_1 = "llama-gptq-v2-asym-g32", "llama-gguf-q4_1"


@dataclass(frozen=True)
class Compiled:
    """A checkpoint's bundle, a prompt, and the float model's logits for it."""

    bundle: Bundle
    tokens: list[int]
    logits: np.ndarray


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=slow) if name in ALIKE else name for name in MODELS]
)
def model(request: pytest.FixtureRequest, checkpoints: Path, compiled: Compile, portable: str) -> Compiled:
    name = request.param
    options = {"activations": "none"} if name in ASKING else {}
    folder = compiled(name, cpu=portable if MODELS[name] else "host", **options)
    return Compiled(halfbyte.load(folder), *expected(checkpoints, name))


def expected(checkpoints: Path, name: str) -> tuple[list[int], np.ndarray]:
    values = load_file(checkpoints / name / "expected.safetensors")
    return [int(token) for token in values["tokens"]], values["logits"]


def iree_run_module(folder: Path, scratch: Path, entry: str, inputs: list[str]) -> list[np.ndarray]:
    """The tool's result, given a bundle's flag file; the caller's inputs come first."""
    tool = Path(sysconfig.get_path("scripts")) / "iree-run-module"
    flags = [f"--input={text}" for text in inputs]
    flags += [f"--flagfile={entry}.flags", f"--output=@{scratch / entry}.npy"]
    done = subprocess.run([tool, *flags], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [np.load(scratch / f"{entry}.npy")]


def spelled(tokens: list[int]) -> str:
    return f"{len(tokens)}xi64=" + " ".join(map(str, tokens))


def last_logits(bundle: Bundle, tokens: list[int], chunk: int = 256) -> np.ndarray:
    return Conversation(bundle, chunk=chunk).prefill(tokens)


def test_logits_are_those_of_the_float_model(model: Compiled) -> None:
    got = all_logits(model.bundle, model.tokens)
    assert np.abs(got - model.logits).max() <= 2e-4 * np.abs(model.logits).max()
    assert {layer.activations for layer in model.bundle.manifest.layers} <= {"none", "float"}


def test_prefill_and_decode_give_the_bits_of_forward(model: Compiled) -> None:
    bundle, tokens = model.bundle, model.tokens
    whole = all_logits(bundle, tokens)
    np.testing.assert_array_equal(last_logits(bundle, tokens), whole[-1])
    conversation = Conversation(bundle)
    np.testing.assert_array_equal(conversation.prefill(tokens[:4]), whole[3])
    for place in range(4, len(tokens)):
        np.testing.assert_array_equal(conversation.step(tokens[place]), whole[place])


def test_a_prompt_in_chunks_gives_the_bits_of_the_whole(model: Compiled) -> None:
    whole = last_logits(model.bundle, model.tokens)
    for chunk in (2, 3, 5, 11):
        np.testing.assert_array_equal(last_logits(model.bundle, model.tokens, chunk), whole)


def test_iree_run_module_gives_the_same_bits(model: Compiled, tmp_path: Path) -> None:
    bundle, tokens = model.bundle, model.tokens
    [got] = iree_run_module(bundle.folder, tmp_path, "forward", [spelled(tokens)])
    np.testing.assert_array_equal(got, all_logits(bundle, tokens))
    [got] = iree_run_module(bundle.folder, tmp_path, "prefill", [spelled(tokens), "1xi64=0"])
    np.testing.assert_array_equal(got, last_logits(bundle, tokens))
    [got] = iree_run_module(bundle.folder, tmp_path, "decode", [spelled(tokens[:1]), "1xi64=0"])
    np.testing.assert_array_equal(got, Conversation(bundle).step(tokens[0]))


def test_the_context_can_be_filled_to_its_end(model: Compiled) -> None:
    capacity = model.bundle.manifest.model.max_context
    assert capacity == 64
    vocabulary = model.bundle.manifest.model.vocabulary
    tokens = [int(token) for token in np.random.default_rng(0).integers(0, vocabulary, capacity)]
    whole = all_logits(model.bundle, tokens)
    conversation = Conversation(model.bundle, chunk=16)
    conversation.prefill(tokens[:-1])
    np.testing.assert_array_equal(conversation.step(tokens[-1]), whole[-1])


def test_the_archive_holds_the_checkpoints_bits_per_weight(model: Compiled) -> None:
    """Codes, and scales beside them: no copy of a quantized weight in any wider form."""
    [archive] = model.bundle.manifest.parameters
    quantized = [layer for layer in model.bundle.manifest.layers if layer.scheme != "float"]
    size = {"int4": 0.5, "e2m1": 0.5, "int8": 1.0, "e4m3": 1.0}
    report = json.loads((model.bundle.folder / "report.json").read_text())
    weights = 0.0
    for layer in quantized:  # the outputs of every expert are padded to 64
        outputs = -(-layer.shape[0] // 64) * 64 if ".experts." in layer.name else layer.shape[0]
        weights += outputs * layer.shape[1] * size[layer.scheme[:4]]
    codes = sum(tensor.bytes for key, tensor in archive.tensors.items() if key.endswith(".codes"))
    assert weights <= codes <= 1.05 * weights
    packed = [key.removesuffix(".codes") for key in archive.tensors if key.endswith(".codes")]
    experts = {f"{name}.{side}" for name in report["experts"] for side in ("up", "down")}
    assert experts <= set(packed)
    members = [m for name in packed if name not in experts for m in report["merged"].get(name, [name])]
    members += [member for linears in report["experts"].values() for member in linears]
    assert sorted(members) == sorted(layer.name for layer in quantized)
    assert not any(f"{layer.name}.weight" in archive.tensors for layer in quantized)


@pytest.mark.parametrize("name", ASKING)
def test_activations_are_what_the_checkpoint_asks_for(
    checkpoints: Path, compiled: Compile, tmp_path: Path, name: str
) -> None:
    """Case 65: W4A8, W4AFP8 and e4m3 checkpoints run with quantized activations when nothing else is said."""
    tokens, want = expected(checkpoints, name)
    dynamic = load_file(checkpoints / name / "expected.safetensors")["logits_dynamic"]
    # What is expected rounds the inputs of every layer, also of those that would be in float beside latents.
    options = {"latent_cache": "off"} if name == "deepseek-w4afp8" else {}
    bundle = halfbyte.load(compiled(name, **options))
    got = all_logits(bundle, tokens)
    largest = np.abs(want).max()
    assert np.abs(got - dynamic).max() <= 2e-2 * largest
    assert np.abs(got - want).max() > 1e-3 * largest
    quantized = [layer for layer in bundle.manifest.layers if layer.scheme != "float"]
    assert {layer.activations for layer in quantized} == ASKING[name]
    if "fp8" not in ASKING[name]:
        assert all("_int8_" in layer.kernel for layer in quantized)
    np.testing.assert_array_equal(last_logits(bundle, tokens), got[-1])
    [again] = iree_run_module(bundle.folder, tmp_path, "forward", [spelled(tokens)])
    np.testing.assert_array_equal(again, got)


@pytest.mark.parametrize("name", [V2, Q4_1])
def test_int8_activations_by_token(checkpoints: Path, compiled: Compile, name: str) -> None:
    """Case 65: the mode asked for really runs, and gives other numbers than float activations."""
    tokens, want = expected(checkpoints, name)
    bundle = halfbyte.load(compiled(name, activations="int8"))
    got = all_logits(bundle, tokens)
    largest = np.abs(want).max()
    assert 1e-3 * largest < np.abs(got - want).max() < 0.5 * largest
    assert {layer.activations for layer in bundle.manifest.layers} <= {"int8", "float"}
    conversation = Conversation(bundle)
    conversation.prefill(tokens[:5])
    for place in range(5, len(tokens)):
        np.testing.assert_array_equal(conversation.step(tokens[place]), got[place])


def test_two_conversations_do_not_see_each_other(checkpoints: Path, compiled: Compile) -> None:
    tokens, _ = expected(checkpoints, V2)
    bundle = halfbyte.load(compiled(V2))
    alone = [last_logits(bundle, text) for text in (tokens, tokens[::-1])]
    first, second = Conversation(bundle), Conversation(bundle)
    first.prefill(tokens[:6])
    second.prefill(tokens[::-1][:3])
    np.testing.assert_array_equal(first.prefill(tokens[6:]), alone[0])
    np.testing.assert_array_equal(second.prefill(tokens[::-1][3:]), alone[1])


@pytest.mark.parametrize(
    ("name", "dtype", "caches"), [("base-gptq", "f16", "f32"), ("qwen3-gptq-dynamic", "bf16", "bf16")]
)
def test_models_of_16_bits(
    checkpoints: Path, compiled: Compile, portable: str, name: str, dtype: str, caches: str
) -> None:
    tokens, want = expected(checkpoints, name)
    cpu = portable if MODELS[name] else "host"
    bundle = halfbyte.load(compiled(name, dtype=dtype, kv_cache=caches, cpu=cpu))
    assert {cache.dtype for cache in bundle.manifest.caches} == {caches}
    got = all_logits(bundle, tokens)
    assert np.abs(got - want).max() <= 3e-2 * np.abs(want).max()
    margin = np.diff(np.sort(want, -1)[:, -2:], axis=-1)[:, 0]
    clear = margin > 6e-2 * np.abs(want).max()
    assert clear.any()
    np.testing.assert_array_equal(got.argmax(-1)[clear], want.argmax(-1)[clear])
    conversation = Conversation(bundle)
    conversation.prefill(tokens[:-1])
    assert np.abs(conversation.step(tokens[-1]) - want[-1]).max() <= 3e-2 * np.abs(want).max()


def test_min_tokens_switches_between_the_two_ways(checkpoints: Path, compiled: Compile) -> None:
    """Case 94: below the limit the bits of float activations, from it on those of int8."""
    name = V2
    tokens, _ = expected(checkpoints, name)
    both = halfbyte.load(compiled(name, activations="int8", min_tokens=5))
    few, many = (halfbyte.load(compiled(name, **options)) for options in ({}, {"activations": "int8"}))
    for count in (1, 2, 4, 5, 12):
        want = all_logits(few if count < 5 else many, tokens[:count])
        np.testing.assert_array_equal(all_logits(both, tokens[:count]), want)
    kernels = {layer.kernel for layer in both.manifest.layers if layer.scheme != "float"}
    assert kernels and all("w4_int8" in kernel and "w4_planes3" in kernel for kernel in kernels)
    report = json.loads((both.folder / "report.json").read_text())
    assert report["options"]["min_tokens"] == 5


def test_generates_the_same_tokens_again(checkpoints: Path, compiled: Compile) -> None:
    tokens, _ = expected(checkpoints, V2)
    bundle = halfbyte.load(compiled(V2))
    text = list(tokens)
    for _ in range(6):
        text.append(int(all_logits(bundle, text)[-1].argmax()))
    conversation, out = Conversation(bundle), []
    logits = conversation.prefill(tokens)
    for _ in range(6):
        out.append(int(logits.argmax()))
        logits = conversation.step(out[-1])
    assert out == text[len(tokens) :]
