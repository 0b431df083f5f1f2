"""Whole models whose norms no linear is fused with: all of them are our kernels, and the logits are transformers'."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from vulkan_device import no_device

import halfbyte
from halfbyte.passes.find_norms import DONE
from halfbyte.runtime import Conversation
from halfbyte.runtime.logits import all_logits

NAME = "qwen3-autoround-awq-asym-g64"
NORMS = [f"model.layers.{n}.self_attn.{part}_norm" for n in range(2) for part in "qk"] + ["model.norm"]


@pytest.mark.parametrize("target", ["cpu", "vulkan"])
def test_norms_of_heads_and_before_the_head(target: str, tmp_path: Path, checkpoints: Path) -> None:
    sources = tmp_path / "sources"
    options = halfbyte.CompileOptions(
        target=target,
        max_context=64,
        activations="none",
        cache=False,
        iree_flags=(f"--iree-hal-dump-executable-sources-to={sources}",),
    )
    made = halfbyte.compile(checkpoints / NAME, tmp_path / "out", options)
    assert made.report["norms"] == dict.fromkeys(NORMS, DONE)
    [step] = [step for step in made.report["passes"] if step["name"] == "find-norms"]
    assert step["changed"] == 3 * len(NORMS)  # of three entry points
    texts = {file.name: file.read_text() for file in sources.iterdir()}
    # Those of queries and keys are computed with their rotation.
    assert {found[1] for name in texts if (found := re.search(r"_rms_norm\w{8}_(\d+)_f32_f32", name))} == {
        "128"
    }
    assert any(re.search(r"_rotate_merged_append_32x32_r16_norm\w{8}_f32_f32_f32", name) for name in texts)
    ours = [name for name in texts if "halfbyte_" in name]
    assert len(ours) > 5
    for name in texts.keys() - ours:
        assert "math.rsqrt" not in texts[name] and "math.sqrt" not in texts[name], name
    if target != "cpu" and no_device(target):
        return
    values = load_file(checkpoints / NAME / "expected.safetensors")
    tokens, logits = [int(token) for token in values["tokens"]], values["logits"]
    bundle = halfbyte.load(tmp_path / "out", device=target)
    got, largest = all_logits(bundle, tokens), np.abs(logits).max()
    assert np.abs(got - logits).max() <= 1e-5 * largest
    conversation = Conversation(bundle)
    rows = [conversation.prefill(tokens[:4]), *(conversation.step(token) for token in tokens[4:])]
    np.testing.assert_allclose(np.stack(rows), got[3:], atol=1e-5 * largest, rtol=0)
