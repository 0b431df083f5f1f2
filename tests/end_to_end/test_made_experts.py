"""Families of models with experts, made by hand: logits of transformers' own model, the bits of every reference."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compared_logits import check_float_models, check_logits
from made_compressed_tensors import signed_layer
from made_experts import FAMILIES, Codes, Made, made_model, quantize, random_codes, write_experts
from slow import SLOW, slow

import halfbyte
from halfbyte.runtime import Conversation
from halfbyte.runtime.logits import all_logits
from halfbyte.verify_model import Limits, verify

TOKENS = [3, 9, 31, 0, 17, 8, 8, 40, 1, 2]
# A family for each form that blocks of experts have: the others' layers are the same kernels of the same sizes, which
# verify would compile once more, and their logits are compared as all are.
VERIFIED = ("mixtral", "qwen2_moe", "granitemoe", "deepseek_v3", "llama4_text", "gpt_oss")
# Compiled and compared as thoroughly elsewhere: below and in test_logits.py, and in test_fp8_experts.py.
COMPILED_ELSEWHERE = ("qwen3_moe", "llama4_text two experts per token")
# Whose routing and blocks are parts of others' that are compiled.
LIKE_OTHERS = ("olmoe", "granitemoeshared", "minimax_m2", "ernie4_5_moe", "deepseek_v2 greedy")
# Whose layers are all alike: one of them is enough.
ALL_ALIKE = ("mixtral", "olmoe", "granitemoe", "granitemoeshared", "minimax_m2")


def quantizes(name: str) -> bool:
    """All but routers, heads and shared experts."""
    return "_proj" in name and "shared" not in name


def quantizes_shared(name: str) -> bool:
    return "_proj" in name


def written(folder: Path, family: str) -> tuple[Made, Path]:
    """Six experts, some with zero points and some without, groups of 8 and 16, dense layers, shared experts."""
    made = made_model(family, num_hidden_layers=1 if family in ALL_ALIKE else 2)
    # IREE's own code for linears in float takes long to compile: once for latent attention is enough.
    quantize(made, quantizes_shared if family.startswith("deepseek_v2") else quantizes)
    return made, write_experts(folder, made)


@pytest.mark.parametrize("family", FAMILIES)
def test_float_models_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    made, folder = written(tmp_path / "model", family)
    check_float_models(folder, made.logits(TOKENS), TOKENS)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=slow) if family in LIKE_OTHERS else family
        for family in FAMILIES
        if family not in COMPILED_ELSEWHERE
    ],
)
def test_logits_are_those_of_transformers(tmp_path: Path, portable: str, family: str) -> None:
    made, folder = written(tmp_path / "model", family)
    cpu, out = portable if family in ("mixtral", "gpt_oss") else "host", tmp_path / "out"
    halfbyte.compile(folder, out, halfbyte.CompileOptions(max_context=32, cpu=cpu))
    check_logits(halfbyte.load(out), made.logits, TOKENS)
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


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_quantized_activations(tmp_path: Path, portable: str, family: str) -> None:
    """Shared experts that are quantized, biases, the clamped product; a block with int8 and one with e4m3."""
    layers = {"qwen2_moe": 3, "gpt_oss": 2}[family]  # the first of qwen2_moe's is dense
    made = made_model(family, seed=1, num_hidden_layers=layers)
    quantize(made, lambda name: "_proj" in name)
    folder, out = write_experts(tmp_path / "model", made, packed=False), tmp_path / "out"
    last = f"model.layers.{layers - 1}."
    options = halfbyte.CompileOptions(
        max_context=32, activations="int8", layers=(f"{last}*=fp8",), cpu=portable
    )
    halfbyte.compile(folder, out, options)
    found = verify(out, folder, tokens=TOKENS, limits=Limits(kl=9.0))
    assert found.failures == () and all(check.equal for check in found.layers)
    rows = {row["name"]: row["mode"] for row in json.loads((out / "report.json").read_text())["layers"]}
    for name, mode in rows.items():
        assert mode == ("float" if name not in made.codes else "W4AFP8" if name.startswith(last) else "W4A8")
    assert {*rows.values()} == {"float", "W4A8", "W4AFP8"}


def several_schemes(name: str, shape: tuple[int, int], seed: int) -> Codes:
    """Case 63: gate and up of different groups; and two groups of experts that are alike each."""
    expert = int(name.split(".experts.")[-1].split(".")[0]) if ".experts." in name else 0
    size = 8 if expert == 1 and name.endswith("up_proj") else 32 if expert > 3 else 16
    codes, zeros, scales = signed_layer(shape, -(-shape[1] // size), seed)
    return Codes(codes, zeros, scales / np.float32(8), size)


# What of four layers is left in float: a block, an expert, two projections. The last has several schemes.
IN_FLOAT = (
    r"layers\.0\.mlp\.experts\.|layers\.1\.mlp\.experts\.3\.|layers\.2\..*experts\.(2\.up|5\.down)_proj"
)
# Experts that one kernel computes, by layer.
ALIKE = [(1, 5), (2, 4), (3, 2), (3, 3)]


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("gpt_oss", marks=slow)])
def test_experts_that_are_not_all_alike(tmp_path: Path, portable: str, family: str) -> None:
    """Cases 56, 58, 63: rules that leave whole blocks, experts or projections in float, or give them other groups."""

    def draw(name: str, shape: tuple[int, int], seed: int) -> Codes:
        return (several_schemes if ".layers.3." in name else random_codes)(name, shape, seed)

    more: dict[str, Any] = {
        "qwen3_moe": {"decoder_sparse_step": 1},
        "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    }[family]
    made = made_model(family, seed=2, num_hidden_layers=4, **more)
    quantize(made, lambda name: "_proj" in name and not re.search(IN_FLOAT, name), draw)
    folder, out = write_experts(tmp_path / "model", made), tmp_path / "out"
    halfbyte.compile(folder, out, halfbyte.CompileOptions(max_context=32, cpu=portable))
    bundle = halfbyte.load(out)
    check_logits(bundle, made.logits, TOKENS)
    want = made.logits(TOKENS[:1])[0]
    assert np.abs(Conversation(bundle).prefill(TOKENS[:1]) - want).max() <= 1e-4 * np.abs(want).max()
    report = json.loads((out / "report.json").read_text())
    counts = [(int(name.split(".")[2]), len(linears) // 3) for name, linears in report["experts"].items()]
    assert sorted(counts) == ALIKE
    packed = [row["name"] for row in report["layers"] if row["mode"] == "W4A16"]
    assert set(packed) == set(made.codes)
    found = verify(out, folder, tokens=TOKENS)
    assert found.failures == () and all(check.equal for check in found.layers)
    assert max(check.float_error for check in found.layers) < 1e-5


def test_several_schemes_with_quantized_activations(tmp_path: Path, portable: str) -> None:
    made = made_model("mixtral", seed=3)
    quantize(made, quantizes, several_schemes)
    folder, out = write_experts(tmp_path / "model", made), tmp_path / "out"
    halfbyte.compile(folder, out, halfbyte.CompileOptions(max_context=32, cpu=portable, activations="int8"))
    report = json.loads((out / "report.json").read_text())
    assert sorted(len(linears) // 3 for linears in report["experts"].values()) == [2, 2, 3, 3]
    found = verify(out, folder, tokens=TOKENS, limits=Limits(kl=9.0))
    assert found.failures == () and all(check.equal for check in found.layers)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_equal_scores_choose_as_torch_does(tmp_path: Path, family: str) -> None:
    """Rows of the router that are equal: of every three experts each gets the same score; from 1 to 600 tokens."""
    more = {"decoder_sparse_step": 1} if family == "qwen3_moe" else {}
    made = made_model(family, seed=7, max_position_embeddings=1024, **more)
    router = torch.empty(0, 0)
    with torch.no_grad():
        for name, value in [*made.model.named_parameters(), *made.model.named_buffers()]:
            if name.endswith(("mlp.gate.weight", "e_score_correction_bias")):
                value.copy_(value[[0, 1, 0, 1, 0, 1]])
                router = value if value.dim() == 2 else router
    for rows in (600, 1):
        scores = torch.nn.functional.linear(torch.randn(rows, router.shape[1]), router)
        if not (scores[:, :2] == scores[:, 2:4]).all() or not (scores[:, :2] == scores[:, 4:]).all():
            pytest.skip(
                "on this CPU torch adds up equal columns of a product differently: no scores are equal"
            )
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
