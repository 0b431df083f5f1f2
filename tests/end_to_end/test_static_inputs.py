"""int8 layers with the scales of their inputs in the file: compiled, merged, run and verified."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from made_checkpoints import linear_shapes, llama_config
from made_compressed_tensors import INT8, WEIGHTS, ct_folder, group, int_parts, packed_parts, signed_layer
from safetensors.torch import load_file, save_file

import halfbyte
from halfbyte.verify_model import verify

Compile = Callable[..., Path]
NAME = "llama-ct-static-int8"
ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
ASYMMETRIC = INT8 | {"strategy": "tensor", "dynamic": False, "symmetric": False}
EIGHT = WEIGHTS | {"num_bits": 8, "strategy": "channel", "group_size": None}
TOKENS = [3, 9, 31, 0, 17, 8, 8]


def static_model(folder: Path) -> Path:
    """Attention W4, the rest W8, with zero points; q has another scale than k and v, up the one of gate."""
    config = llama_config(intermediate_size=128)
    parts: dict[str, Any] = {}
    for seed, (name, shape) in enumerate(linear_shapes(config).items()):
        four = ATTENTION in name
        codes, _, scales = signed_layer(shape, 2 if four else 1, seed, bits=4 if four else 8)
        parts |= (packed_parts if four else int_parts)(name, codes, None, scales / (8 if four else 128))
        parts[f"{name}.input_scale"] = torch.tensor([0.04 if name.endswith("q_proj") else 0.03]).bfloat16()
        parts[f"{name}.input_zero_point"] = torch.tensor([-7], dtype=torch.int8)
    asked = {"input_activations": ASYMMETRIC}
    groups = [group(["re:.*self_attn"], **asked), group(["re:.*mlp"], EIGHT, **asked)]
    return ct_folder(folder, config, parts, groups, format="mixed-precision")


def test_linears_merge_where_the_values_agree(tmp_path: Path, portable: str) -> None:
    """With few tokens in float; one layer rounded otherwise by name."""
    model, out = static_model(tmp_path / "model"), tmp_path / "out"
    options: dict[str, Any] = {"layers": ("*.o_proj=int8",), "cpu": portable, "min_tokens": 4}
    halfbyte.compile(model, out, halfbyte.CompileOptions(max_context=32, **options))
    report = json.loads((out / "report.json").read_text())
    assert report["warnings"] == []
    assert {row["name"]: row["activations"] for row in report["layers"] if row["scheme"] != "float"} == {
        name: "int8" if name.endswith("o_proj") else "int8_fixed"
        for name in linear_shapes(llama_config(intermediate_size=128))
    }
    assert [*report["merged"]] == [f"{ATTENTION}.k_proj+v_proj", f"{MLP}.gate_proj+up_proj"]
    archive = json.loads((out / "manifest.json").read_text())["parameters"][0]["tensors"]
    holders = [f"{ATTENTION}.q_proj", f"{ATTENTION}.k_proj", f"{MLP}.gate_proj", f"{MLP}.down_proj"]
    assert {key for key in archive if key.endswith(".fixed")} == {f"{holder}.fixed" for holder in holders}
    for tokens in (TOKENS, TOKENS[:3]):  # as many as --min-tokens says, and fewer
        found = verify(out, model, tokens=tokens)
        assert found.failures == () and len(found.layers) == 5
        assert all(check.equal for check in found.layers)


def test_a_bundle_with_another_scale_fails(compiled: Compile, checkpoints: Path, tmp_path: Path) -> None:
    """What a layer rounds with is read from the archive."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_bytes((checkpoints / NAME / "config.json").read_bytes())
    tensors = load_file(checkpoints / NAME / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.input_scale"] *= 2
    save_file(tensors, model / "model.safetensors")
    found = verify(compiled(NAME), model, tokens=TOKENS)
    assert [failure.split(":")[0] for failure in found.failures] == ["model.layers.1.mlp.down_proj"]


def test_what_is_asked_for_goes_before_the_checkpoint(checkpoints: Path) -> None:
    def kinds(**options: Any) -> dict[str, str]:
        found = halfbyte.inspect(checkpoints / NAME, **options).layers
        return {layer.name: layer.activations for layer in found if layer.scheme != "float"}

    assert set(kinds(activations="int8").values()) == {"int8"}
    assert set(kinds(activations="none").values()) == {"none"}
    chosen = kinds(layers=["*.0.mlp.*=int8", "*.1.*=none"])
    assert {chosen[name] for name in chosen if ".0.mlp." in name} == {"int8"}
    assert {chosen[name] for name in chosen if ".0.self_attn." in name} == {"int8_fixed"}
    assert {chosen[name] for name in chosen if ".1." in name} == {"none"}
    plans = {layer.name: layer.plan for layer in halfbyte.inspect(checkpoints / NAME).layers}
    assert plans["model.layers.0.self_attn.q_proj"].startswith("W8A8: int8 activations with a scale of the")
