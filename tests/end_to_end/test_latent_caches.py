"""Caches of latents: their sizes, what the report says, and the logits beside those with keys and values of heads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from made_experts import FAMILIES, made_model, quantize, write_experts
from safetensors.numpy import load_file

import halfbyte
from halfbyte.errors import UsageError
from halfbyte.runtime import Conversation
from halfbyte.runtime.logits import all_logits
from halfbyte.verify_model import verify

CONTEXT = 200
# No width is a multiple of 16 but those of blocks; the rotated keys are padded.
WIDTHS = {"kv_lora_rank": 72, "qk_nope_head_dim": 12, "qk_rope_head_dim": 6, "v_head_dim": 20, "head_dim": 6}
EXPANDING = [f"model.layers.{layer}.self_attn.kv_b_proj" for layer in range(2)]


def test_int4_with_latents_and_without(tmp_path: Path) -> None:
    """A text of several blocks, whole and in chunks; the same model with every head's keys and values."""
    made = made_model("deepseek_v3", seed=5, max_position_embeddings=CONTEXT, **WIDTHS)
    quantize(made, lambda name: "_proj" in name)
    folder = write_experts(tmp_path / "model", made)
    prompt = np.random.default_rng(0).integers(0, 48, 150).tolist()
    want = made.logits(prompt)
    largest, sizes, failures = np.abs(want).max(), {}, {}
    for choice in ("auto", "off"):
        out = tmp_path / choice
        options = halfbyte.CompileOptions(max_context=CONTEXT, latent_cache=choice)  # type: ignore[arg-type]
        halfbyte.compile(folder, out, options)
        bundle = halfbyte.load(out)
        whole = all_logits(bundle, prompt)
        assert np.abs(whole - want).max() <= 1e-4 * largest
        conversation = Conversation(bundle)
        for start, end in ((0, 70), (70, 71), (71, 130), (130, 131), (131, 150)):
            got = conversation.prefill(prompt[start:end])
            assert np.abs(got - whole[end - 1]).max() <= 1e-5 * largest
        sizes[choice] = [(cache.name, cache.shape, cache.dtype) for cache in bundle.manifest.caches]
        report = json.loads((out / "report.json").read_text())
        rows = [row for row in report["layers"] if row["name"] in EXPANDING]
        assert [row["name"] for row in rows] == EXPANDING
        attention = report["attention"]["model.layers.0.self_attn"]
        if choice == "auto":
            assert {row["mode"] for row in rows} == {"float"} and "latents" in attention
            assert all("cache of latents" in row["reason"] for row in rows)
            assert all(row["kernel"].startswith("halfbyte_head_linear_") for row in rows)
        else:
            assert {row["mode"] for row in rows} == {"W4A16"} and "latents" not in attention
        found = verify(out, folder, tokens=prompt[:20])
        failures[choice] = found.failures
        kinds = {row["name"] for row in report["layers"] if row["mode"] == "W4A16"}
        assert set(EXPANDING).isdisjoint(kinds) == (choice == "auto")
    assert failures == {"auto": (), "off": ()}
    # 72 + 6 columns, filled up to 80, in 4 blocks; 4 heads of 18 and 20 (32) columns.
    assert sizes["auto"] == [(f"kv{layer}", (1, 4, 64 * 80), "f32") for layer in range(2)]
    heads = [((4, 4, 18, 64), "k"), ((4, 4, 64 * 32), "v")]
    assert sizes["off"] == [(f"{kind}{layer}", shape, "f32") for layer in range(2) for shape, kind in heads]


def test_e4m3_layers_and_16_bits(tmp_path: Path, checkpoints: Path) -> None:
    """kv_b_proj in blocks of e4m3, dequantized to the model's dtype; caches of 16 bits, their type chosen beside."""
    folder, out = checkpoints / "deepseek-w4afp8", tmp_path / "out"
    expected = load_file(folder / "expected.safetensors")
    tokens = [int(token) for token in expected["tokens"]]
    options = halfbyte.CompileOptions(
        max_context=128, activations="none", dtype="bf16", kv_cache="bf16", latent_cache="on"
    )
    halfbyte.compile(folder, out, options)
    bundle = halfbyte.load(out)
    assert [(cache.shape, cache.dtype) for cache in bundle.manifest.caches] == [((1, 2, 64 * 48), "bf16")] * 2
    [archive] = bundle.manifest.parameters
    key = "model.layers.0.self_attn.kv_b_proj"
    # 4 heads, 32 columns of queries and of values, latents of 32: two bytes each.
    assert {name: tensor.bytes for name, tensor in archive.tensors.items() if name.startswith(key)} == {
        f"{key}.keys": 2 * 4 * 32 * 32, f"{key}.values": 2 * 4 * 32 * 32,
    }  # fmt: skip
    whole, want = all_logits(bundle, tokens), expected["logits"]
    assert np.abs(whole - want).max() <= 3e-2 * np.abs(want).max()
    conversation = Conversation(bundle)
    steps = [conversation.prefill(tokens[:3]), *(conversation.step(token) for token in tokens[3:])]
    assert np.abs(np.stack(steps) - whole[2:]).max() <= 3e-2 * np.abs(want).max()
    assert verify(out, folder, tokens=tokens).failures == ()


def test_models_without_latents_are_told_so(tmp_path: Path, checkpoints: Path) -> None:
    folder = checkpoints / "llama-gptq-v2-asym-g32"
    for run in (
        lambda: halfbyte.compile(folder, tmp_path / "out", halfbyte.CompileOptions(latent_cache="on")),
        lambda: halfbyte.inspect(folder, latent_cache="on"),
    ):
        with pytest.raises(
            UsageError, match=r"no latent attention(.|\n)*found: llama(.|\n)*deepseek_v2, deepseek_v3"
        ):
            run()
    with pytest.raises(UsageError, match="no such choice"):
        halfbyte.inspect(folder, latent_cache="maybe")


@pytest.mark.parametrize(("rank", "fits"), [(888, True), (889, False)])
def test_latents_that_are_too_wide(tmp_path: Path, rank: int, fits: bool) -> None:
    """With 8 rotated columns; the kernels take 896."""
    made = made_model("deepseek_v3", kv_lora_rank=rank)
    quantize(made, lambda name: "down_proj" in name)
    folder = write_experts(tmp_path / "model", made)
    found = halfbyte.inspect(folder)
    assert ("cache of latents" in {plan.name: plan for plan in found.layers}[EXPANDING[0]].plan) == fits
    assert any("897 columns are wider than 896" in warning for warning in found.warnings) != fits
    if not fits:
        with pytest.raises(UsageError, match=r"too wide(.|\n)*found: 897 columns"):
            halfbyte.inspect(folder, latent_cache="on")


def test_inspect_says_what_becomes_of_the_layers(checkpoints: Path) -> None:
    folder = checkpoints / "deepseek-w4afp8"
    plans = {
        choice: {plan.name: plan for plan in halfbyte.inspect(folder, latent_cache=choice).layers}
        for choice in ("auto", "off")
    }
    assert "cache of latents" in plans["auto"][EXPANDING[0]].plan
    assert plans["off"][EXPANDING[0]].plan.startswith("WFP8AFP8")
    others = [{name: plan for name, plan in of.items() if name not in EXPANDING} for of in plans.values()]
    assert others[0] == others[1]


def test_families_with_latents_are_known() -> None:
    from halfbyte.checkpoints.model_config import LATENT

    assert {name.split()[0] for name, config in FAMILIES.items() if "kv_lora_rank" in config} == set(LATENT)
