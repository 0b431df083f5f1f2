"""Families of models with experts, made by hand: logits of transformers' own model, the bits of every reference."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_compressed_tensors import signed_layer
from made_experts import FAMILIES, Codes, made_model, quantize, write_experts
from slow import SLOW

import halfbyte
from halfbyte.checkpoints import load_float_model, open_checkpoint
from halfbyte.checkpoints.streamed_model import streamed_model
from halfbyte.runtime import Conversation
from halfbyte.runtime.logits import all_logits
from halfbyte.verify_model import Limits, verify

TOKENS = [3, 9, 31, 0, 17, 8, 8, 40, 1, 2]
# A family for each form that blocks of experts have: the others' layers are the same kernels of the same sizes, which
# verify would compile once more, and their logits are compared as all are.
VERIFIED = ("mixtral", "qwen2_moe", "granitemoe", "deepseek_v3", "llama4_text", "gpt_oss")


def quantizes(name: str) -> bool:
    """All but routers, heads and shared experts."""
    return "_proj" in name and "shared" not in name


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(tmp_path: Path, portable: str, family: str) -> None:
    """Six experts, some with zero points and some without, groups of 8 and 16, dense layers, shared experts."""
    made = made_model(family)
    quantize(made, quantizes)
    folder, out = write_experts(tmp_path / "model", made), tmp_path / "out"
    checkpoint = open_checkpoint(folder)
    assert checkpoint.warnings == []
    want = made.logits(TOKENS)
    largest = np.abs(want).max()
    with torch.no_grad():
        own = load_float_model(checkpoint)(torch.tensor([TOKENS])).logits[0].numpy()
        streamed = streamed_model(checkpoint)(torch.tensor([TOKENS])).logits[0].numpy()
    assert np.array_equal(own, streamed) and np.abs(own - want).max() <= 1e-5 * largest
    cpu = portable if family in ("mixtral", "gpt_oss") else "host"
    halfbyte.compile(folder, out, halfbyte.CompileOptions(max_context=32, cpu=cpu))
    bundle = halfbyte.load(out)
    got = all_logits(bundle, TOKENS)
    assert np.abs(got - want).max() <= 1e-4 * largest
    for prompt in (TOKENS, TOKENS[::-1]):  # two in a row, token by token from the fourth on
        whole, conversation = all_logits(bundle, prompt), Conversation(bundle)
        steps = [conversation.prefill(prompt[:4]), *(conversation.step(token) for token in prompt[4:])]
        # Not to the bit: float layers, such as shared experts, are IREE's own code.
        assert np.abs(np.stack(steps) - whole[3:]).max() <= 1e-5 * largest
    assert np.abs(all_logits(bundle, TOKENS[::-1]) - made.logits(TOKENS[::-1])).max() <= 1e-4 * largest
    report = json.loads((out / "report.json").read_text())
    blocks = [name for name, _ in made.model.named_modules() if name.endswith(".experts")]
    assert [*report["experts"]] == blocks and all(
        len(linears) == 18 for linears in report["experts"].values()
    )
    modes = {row["name"]: row["mode"] for row in report["layers"]}
    # Over latents, kv_b_proj is in float.
    quantized = {name for name in made.codes if not name.endswith("kv_b_proj")}
    assert {name for name, mode in modes.items() if mode == "W4A16"} == quantized
    if family in VERIFIED or SLOW:
        found = verify(out, folder, tokens=TOKENS)
        assert found.failures == () and all(check.equal for check in found.layers)


@pytest.mark.parametrize("activations", ["int8", "fp8"])
@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_quantized_activations(tmp_path: Path, portable: str, family: str, activations: Any) -> None:
    """Shared experts that are quantized, biases, the clamped product."""
    made = made_model(family, seed=1)
    quantize(made, lambda name: "_proj" in name)
    folder, out = write_experts(tmp_path / "model", made, packed=False), tmp_path / "out"
    halfbyte.compile(
        folder, out, halfbyte.CompileOptions(max_context=32, activations=activations, cpu=portable)
    )
    found = verify(out, folder, tokens=TOKENS, limits=Limits(kl=9.0))
    assert found.failures == () and all(check.equal for check in found.layers)
    modes = {row["mode"] for row in json.loads((out / "report.json").read_text())["layers"]}
    assert modes == {"float", {"int8": "W4A8", "fp8": "W4AFP8"}[activations]}


# What is left in float, by name, and what becomes of the two blocks: experts that one kernel computes, by block.
MIXED = {
    "a block in float": (r"layers\.0\.mlp\.experts\.|shared", {1: 6}),
    "a float projection": (r"experts\.2\.up_proj|experts\.5\.down_proj|shared", {0: 4, 1: 4}),
    "a float expert": (r"layers\.1\.mlp\.experts\.3\.", {0: 6, 1: 5}),
}


@pytest.mark.parametrize("kind", MIXED)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_that_are_not_all_quantized(tmp_path: Path, portable: str, family: str, kind: str) -> None:
    """Cases 56, 58: rules that leave whole blocks, experts or projections in float."""
    pattern, alike = MIXED[kind]
    made = made_model(family, seed=2, **({"decoder_sparse_step": 1} if family == "qwen3_moe" else {}))
    quantize(made, lambda name: "_proj" in name and not re.search(pattern, name))
    folder, out = write_experts(tmp_path / "model", made), tmp_path / "out"
    halfbyte.compile(folder, out, halfbyte.CompileOptions(max_context=32, cpu=portable))
    bundle, want = halfbyte.load(out), made.logits(TOKENS)
    assert np.abs(all_logits(bundle, TOKENS) - want).max() <= 1e-4 * np.abs(want).max()
    assert np.abs(Conversation(bundle).prefill(TOKENS[:1]) - want[0]).max() <= 1e-4 * np.abs(want).max()
    report = json.loads((out / "report.json").read_text())
    counts = {int(name.split(".")[2]): len(linears) // 3 for name, linears in report["experts"].items()}
    assert counts == alike
    packed = [row["name"] for row in report["layers"] if row["mode"] == "W4A16"]
    assert set(packed) == set(made.codes)
    found = verify(out, folder, tokens=TOKENS)
    assert found.failures == () and all(check.equal for check in found.layers)
    assert max(check.float_error for check in found.layers) < 1e-5


def test_experts_of_several_schemes(tmp_path: Path, portable: str) -> None:
    """Case 63: gate and up of different groups; and two groups of experts that are alike each."""

    def draw(name: str, shape: tuple[int, int], seed: int) -> Codes:
        expert = int(name.split(".experts.")[-1].split(".")[0]) if ".experts." in name else 0
        size = 8 if expert == 1 and name.endswith("up_proj") else 32 if expert > 3 else 16
        codes, zeros, scales = signed_layer(shape, -(-shape[1] // size), seed)
        return Codes(codes, zeros, scales / np.float32(8), size)

    made = made_model("mixtral", seed=3)
    quantize(made, quantizes, draw)
    folder, out = write_experts(tmp_path / "model", made), tmp_path / "out"
    for activations in ("none", "int8"):
        options = halfbyte.CompileOptions(max_context=32, cpu=portable, activations=activations)  # type: ignore[arg-type]
        halfbyte.compile(folder, out, options)
        report = json.loads((out / "report.json").read_text())
        assert sorted(len(linears) // 3 for linears in report["experts"].values()) == [2, 2, 3, 3]
        found = verify(out, folder, tokens=TOKENS, limits=Limits(kl=9.0))
        assert found.failures == () and all(check.equal for check in found.layers)
        if activations == "none":
            want = made.logits(TOKENS)
            got = all_logits(halfbyte.load(out), TOKENS)
            assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_equal_scores_choose_as_torch_does(tmp_path: Path, family: str) -> None:
    """Rows of the router that are equal: of every three experts each gets the same score; from 1 to 600 tokens."""
    more = {"decoder_sparse_step": 1} if family == "qwen3_moe" else {}
    made = made_model(family, seed=7, max_position_embeddings=1024, **more)
    with torch.no_grad():
        for name, value in [*made.model.named_parameters(), *made.model.named_buffers()]:
            if name.endswith(("mlp.gate.weight", "e_score_correction_bias")):
                value.copy_(value[[0, 1, 0, 1, 0, 1]])
    quantize(made, quantizes)
    folder, out = write_experts(tmp_path / "model", made), tmp_path / "out"
    halfbyte.compile(folder, out, halfbyte.CompileOptions(max_context=640))
    bundle = halfbyte.load(out)
    for tokens in (600, 1, 2, 97, 10):
        prompt = np.random.default_rng(tokens).integers(0, 48, tokens).tolist()
        want = made.logits(prompt)
        assert np.abs(all_logits(bundle, prompt) - want).max() <= 1e-4 * np.abs(want).max()
        last = Conversation(bundle).prefill(prompt)
        assert np.abs(last - want[-1]).max() <= 1e-4 * np.abs(want).max()
    # The choice counts: other experts give other logits.
    with torch.no_grad():
        for name, value in made.model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                value[2:] -= 10 * value[2:]
    assert np.abs(made.logits(TOKENS) - all_logits(bundle, TOKENS)).max() > 1e-2
