"""Checkpoints made by hand, compiled and run: the bits of the reference in every layer, the float model's logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from made_checkpoints import awq_parts, linear_shapes, llama_config, packed_folder, random_layer
from made_gguf import VOCABULARY, float_values, metadata, random_blocks, shapes, write_gguf
from same_weights import random_weights, writers

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
    "ffn_gate": "IQ4_NL",
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
    "gate_proj": "iq4nl symmetric, group 32, f16 scales",
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
            size = 0.05 / {"IQ4_NL": 64, "Q5_1": 8, "Q2_K": 32}.get(kind, 512)  # weights of about 0.05
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


# Inputs per group by layer; -1 is one group per row. K is 72 or, of down_proj, 132.
GROUPS = {"q": 16, "k": 24, "v": -1, "o": 32, "gate": 1024, "up": 1024, "down": 64}


@pytest.mark.parametrize("activations", ["auto", "int8", "fp8"])
def test_shapes_that_fill_nothing(tmp_path: Path, portable: str, activations: Any) -> None:
    """N = 40, 10 and 132, K = 72, 40 and 132, last groups of 8 and 4 inputs, one scheme per member of q, k, v."""
    config = llama_config(
        hidden_size=72, intermediate_size=132, head_dim=10, num_key_value_heads=1, tie_word_embeddings=False
    )
    parts, extra = {}, {}
    for seed, (name, shape) in enumerate({**linear_shapes(config), "lm_head": (32, 72)}.items()):
        size = GROUPS.get(name.rpartition(".")[2].removesuffix("_proj"), 16)
        groups = 1 if size == -1 else -(-shape[1] // size)
        codes, zeros, scales = random_layer(shape, groups, seed)
        parts |= awq_parts(name, codes, zeros, scales / np.float16(8))
        extra[name] = {"bits": 4, "group_size": size}
    values = {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "sym": False}
    folder, out = (
        packed_folder(tmp_path / "model", config, parts, extra_config=extra, **values),
        tmp_path / "out",
    )
    cpu = "host" if activations == "auto" else portable
    halfbyte.compile(folder, out, halfbyte.CompileOptions(max_context=32, activations=activations, cpu=cpu))
    report = json.loads((out / "report.json").read_text())
    assert report["warnings"] == []
    assert {row["mode"] for row in report["layers"]} == {
        {"auto": "W4A16", "int8": "W4A8", "fp8": "W4AFP8"}[activations]
    }
    assert [name.rpartition(".")[2] for name in report["merged"]] == ["gate_proj+up_proj"]
    found = verify(out, folder, tokens=TOKENS)
    assert found.failures == ()
    assert all(check.equal for check in found.layers)
    if activations == "auto":
        got = all_logits(halfbyte.load(out), TOKENS)
        with torch.no_grad():
            want = load_float_model(open_checkpoint(folder))(torch.tensor([TOKENS])).logits[0].numpy()
        assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()


def test_formats_make_the_same_bundle(tmp_path: Path, portable: str) -> None:
    """The same weights from any format: archives and programs equal to the byte."""
    weights, digests = random_weights(4, symmetric=True), {}
    for name in ("gptq", "awq", "auto_round:llm_compressor", "gguf"):
        writer = {"awq": "awq without zeros"}.get(name, name)
        model = writers(4, symmetric=True)[writer](tmp_path / name, weights)
        options = halfbyte.CompileOptions(max_context=32, activations="int8", cpu=portable)
        made = halfbyte.compile(model, tmp_path / "out" / name, options).manifest
        digests[name] = (made.parameters[0].sha256, made.programs[0].sha256)
        assert {layer.activations for layer in made.layers} == {"int8", "float"}
    assert len(set(digests.values())) == 1, digests
