"""Experts with e4m3 weights: DeepSeek's form and compressed-tensors', and beside int4 experts in one block."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compared_logits import check_logits
from made_compressed_tensors import FP8, INT8
from made_experts import (
    Codes,
    Fp8Codes,
    made_model,
    quantize,
    random_codes,
    random_fp8,
    write_experts,
    write_fp8_experts,
)
from safetensors.torch import load_file, save_file

import halfbyte
from halfbyte.check_layers import FP8_LIMIT
from halfbyte.checkpoints import load_float_model, open_checkpoint
from halfbyte.runtime.logits import all_logits
from halfbyte.verify_model import Limits, verify

TOKENS = [3, 9, 31, 0, 17, 8, 8, 40, 1, 2]


def modes(out: Path) -> dict[str, str]:
    return {row["name"]: row["mode"] for row in json.loads((out / "report.json").read_text())["layers"]}


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_every_layer_is_e4m3(tmp_path: Path, portable: str, family: str) -> None:
    """Shared experts, dense layers and latent attention too; I = 40 is no whole number of blocks of 32 x 16."""
    made = made_model(family, seed=4)
    quantize(made, lambda name: "_proj" in name and "kv_a" not in name, random_fp8)
    folder = write_fp8_experts(tmp_path / "model", made, (32, 16))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.warnings == []
    want = made.logits(TOKENS)
    largest = np.abs(want).max()
    with torch.no_grad():
        own = load_float_model(checkpoint)(torch.tensor([TOKENS])).logits[0].numpy()
    assert np.abs(own - want).max() <= 1e-5 * largest
    experts = [plan for plan in halfbyte.inspect(folder).layers if ".experts." in plan.name]
    assert {plan.scheme for plan in experts} == {"e4m3, blocks of 32x16, f32 scales"}
    assert {plan.plan for plan in experts} == {"WFP8AFP8: e4m3 activations per token and block of inputs"}
    for activations in ("none", "auto"):
        out = tmp_path / activations
        dtype = "bf16" if (family, activations) == ("gpt_oss", "auto") else "f32"
        options = halfbyte.CompileOptions(max_context=32, activations=activations, cpu=portable, dtype=dtype)  # type: ignore[arg-type]
        halfbyte.compile(folder, out, options)
        mode = {"none": "WFP8A16", "auto": "WFP8AFP8"}[activations]
        # Over latents, kv_b_proj is in float.
        quantized = {name for name in made.codes if not name.endswith("kv_b_proj")}
        assert {name for name, found in modes(out).items() if found == mode} == quantized
        found = verify(out, folder, tokens=TOKENS, limits=Limits(kl=9.0))
        assert found.failures == ()
        blocks = [check for check in found.layers if check.name.endswith(".experts")]
        assert len(blocks) == sum(name.endswith(".experts.0.up_proj") for name in made.codes)
        assert all(check.limit == FP8_LIMIT for check in blocks)
        assert all(check.float_error < (1e-5 if activations == "none" else 0.3) for check in blocks)
        if activations == "auto":
            continue
        check_logits(halfbyte.load(out), made.logits, TOKENS)


def inputs(layer: Codes | Fp8Codes) -> dict[str, Any]:
    if isinstance(layer, Codes):
        return INT8
    return FP8 | {"strategy": "group", "group_size": layer.block[1]}


def test_beside_int4_in_one_block(tmp_path: Path, portable: str) -> None:
    """Experts 0 to 2 e4m3, 3 and 4 int4, the last both: three kernels; the activations are each group's own."""

    def draw(name: str, shape: tuple[int, int], seed: int) -> Codes | Fp8Codes:
        expert = int(name.split(".experts.")[1].split(".")[0])
        fp8 = expert < 3 or (expert == 5 and name.endswith("up_proj"))
        return (random_fp8 if fp8 else random_codes)(name, shape, seed)

    made = made_model("qwen3_moe", seed=5, decoder_sparse_step=1)
    quantize(made, lambda name: ".experts." in name, draw)
    folder = write_experts(tmp_path / "model", made, inputs=inputs, format="mixed-precision")
    assert open_checkpoint(folder).warnings == []
    for activations in ("none", "auto"):
        out = tmp_path / activations
        options = halfbyte.CompileOptions(max_context=32, activations=activations, cpu=portable)  # type: ignore[arg-type]
        halfbyte.compile(folder, out, options)
        report = json.loads((out / "report.json").read_text())
        assert sorted(len(linears) // 3 for linears in report["experts"].values()) == [2, 2, 3, 3]
        expected = {"none": {"W4A16", "WFP8A16"}, "auto": {"W4A8", "WFP8AFP8"}}[activations]
        assert set(modes(out).values()) == expected | {"float"}
        found = verify(out, folder, tokens=TOKENS, limits=Limits(kl=9.0))
        assert found.failures == ()
        exact = [check for check in found.layers if check.limit == 0]
        assert len(exact) == 6 and all(
            check.equal for check in exact
        )  # alike1, and gate and down of expert 5
    want, got = made.logits(TOKENS), all_logits(halfbyte.load(tmp_path / "none"), TOKENS)
    assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()


def test_llama4_as_a_part_of_a_model_of_images(tmp_path: Path) -> None:
    """As llmcompressor writes it: experts one by one, e4m3 per output, names and configuration of the whole model."""

    def draw(name: str, shape: tuple[int, int], seed: int) -> Fp8Codes:
        made = random_fp8(name, shape, seed)
        scales = np.random.default_rng(seed).uniform(0.0005, 0.003, (shape[0], 1)).astype(np.float32)
        return Fp8Codes(made.bits, scales, (1, shape[1]))

    made = made_model("llama4_text two experts per token", seed=6)
    quantize(made, lambda name: "_proj" in name and "self_attn" not in name, draw)
    image = {"vision_model.patch.weight": torch.zeros(3, 2)}
    said: Any = {"inputs": lambda _: FP8, "format": "float-quantized"}
    folder = write_experts(tmp_path / "model", made, rename=lambda name: f"language_model.{name}", **said)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | image, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    quantization = config.pop("quantization_config")
    whole = {"model_type": "llama4", "text_config": config, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(whole | {"quantization_config": quantization}))
    warnings = open_checkpoint(folder).warnings
    assert len(warnings) == 1, warnings
    [warning] = warnings
    assert warning.startswith("only the text model is compiled") and "vision_model.patch.weight" in warning
    out = tmp_path / "out"
    halfbyte.compile(folder, out, halfbyte.CompileOptions(max_context=32, activations="none"))
    check_logits(halfbyte.load(out), made.logits, TOKENS)
    assert {name for name, mode in modes(out).items() if mode == "WFP8A16"} == {
        f"language_model.{name}" for name in made.codes
    }
    found = verify(out, folder, tokens=TOKENS)
    assert found.failures == () and sum(check.name.endswith(".experts") for check in found.layers) == 2
