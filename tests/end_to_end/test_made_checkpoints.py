"""Checkpoints made by hand, compiled and run: the bits of the reference in every layer, the float model's logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from made_gguf import VOCABULARY, float_values, metadata, random_blocks, shapes, write_gguf

import halfbyte
from halfbyte.checkpoints import load_float_model, open_checkpoint
from halfbyte.runtime.logits import all_logits
from halfbyte.verify_model import verify

TOKENS = [3, 9, 31, 0, 17, 8, 8]
# As llama.cpp mixes them, so that every type meets every other: in a merged layer's place too.
TYPES = {
    "attn_q": "Q4_K",
    "attn_k": "Q4_K",
    "attn_v": "Q6_K",
    "attn_output": "Q5_K",
    "ffn_gate": "Q5_0",
    "ffn_up": "Q5_1",
    "ffn_down": "Q3_K",
    "output": "Q2_K",
    "token_embd": "IQ4_XS",
}
SCHEMES = {
    "q_proj": "int4 minimum, group 32, f32 scales",
    "k_proj": "int4 minimum, group 32, f32 scales",
    "v_proj": "int8 symmetric, group 16, f32 scales",
    "o_proj": "int8 minimum, group 32, f32 scales",
    "gate_proj": "int8 symmetric, group 32, f16 scales",
    "up_proj": "int8 minimum, group 32, f16 scales",
    "down_proj": "int4 symmetric, group 16, f32 scales",
    "lm_head": "int4 minimum, group 16, f32 scales",
}


def mixed_gguf(file: Path) -> Path:
    values = float_values({"output.weight": (VOCABULARY, 256)}, sizes=shapes(256, 512, 64))
    types: dict[str, Any] = {}
    for at, (name, value) in enumerate(values.items()):
        kind = TYPES.get(name.removesuffix(".weight").rpartition(".")[2])
        if kind is not None:
            size = 0.05 / {"Q5_0": 8, "Q5_1": 8, "Q2_K": 32}.get(kind, 512)  # weights of about 0.05
            types[name] = (GGMLQuantizationType[kind], random_blocks(kind, *value.shape, seed=at, size=size))
        elif value.ndim == 1:
            values[name] = np.ones_like(value)
    keys = metadata("llama", embedding_length=256, feed_forward_length=512)
    return write_gguf(file, "llama", keys, values, types)


@pytest.mark.parametrize("activations", ["auto", "int8"])
def test_every_kind_of_gguf_block_in_one_model(tmp_path: Path, portable: str, activations: Any) -> None:
    file, out = mixed_gguf(tmp_path / "model.gguf"), tmp_path / "out"
    cpu = "host" if activations == "auto" else portable
    options = halfbyte.CompileOptions(max_context=32, activations=activations, cpu=cpu)
    halfbyte.compile(file, out, options)
    report = json.loads((out / "report.json").read_text())
    rows = {row["name"].rpartition(".")[2]: row for row in report["layers"]}
    assert {name: row["scheme"] for name, row in rows.items()} == SCHEMES
    assert list(report["merged"].values()) == [
        ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"]
    ]
    found = verify(out, file, tokens=TOKENS)
    assert found.failures == ()
    assert all(check.equal for check in found.layers)
    assert len(found.layers) == len(SCHEMES) - 1
    if activations == "auto":
        got = all_logits(halfbyte.load(out), TOKENS)
        with torch.no_grad():
            want = load_float_model(open_checkpoint(file))(torch.tensor([TOKENS])).logits[0].numpy()
        assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()
