"""Families of models with experts, made by hand: logits of transformers' own model, the bits of every reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_experts import FAMILIES, made_model, quantize, write_experts

import halfbyte
from halfbyte.checkpoints import load_float_model, open_checkpoint
from halfbyte.runtime import Conversation
from halfbyte.runtime.logits import all_logits
from halfbyte.verify_model import Limits, verify

TOKENS = [3, 9, 31, 0, 17, 8, 8, 40, 1, 2]


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
    assert np.abs(own - want).max() <= 1e-5 * largest
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
    assert {name for name, mode in modes.items() if mode == "W4A16"} == set(made.codes)
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
