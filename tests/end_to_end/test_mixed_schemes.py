"""One model with layers of every scheme, and what is said where a scheme and the activations do not go together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_checkpoints import llama_config
from made_compressed_tensors import (
    FP8,
    INT8,
    WEIGHTS,
    ct_folder,
    group,
    int_parts,
    packed_parts,
    signed_layer,
)

import halfbyte
from halfbyte.errors import UnsupportedLayerError
from halfbyte.verify_model import verify

ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
EIGHT = WEIGHTS | {"num_bits": 8, "strategy": "channel", "group_size": None}
E4M3 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}


def e4m3_parts(name: str, shape: tuple[int, int]) -> dict[str, Any]:
    random = np.random.default_rng(7)
    values = torch.from_numpy(random.normal(size=shape).astype(np.float32)).to(torch.float8_e4m3fn)
    scales = random.uniform(0.1, 0.3, (shape[0], 1)).astype(np.float32)
    return {f"{name}.weight": values, f"{name}.weight_scale": scales}


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Case 63: q int4, k int4 of another group size, v int8, gate e4m3, up int4 with zero points."""
    four, other = signed_layer((64, 64), 2), signed_layer((32, 64), 4)
    wide, asymmetric = signed_layer((32, 64), 1, bits=8), signed_layer((96, 64), 2)
    parts: dict[str, Any] = packed_parts(f"{ATTENTION}.q_proj", four[0], None, four[2])
    parts |= int_parts(f"{ATTENTION}.k_proj", other[0], None, other[2])
    parts |= int_parts(f"{ATTENTION}.v_proj", wide[0], None, wide[2] / 16)
    parts |= e4m3_parts(f"{MLP}.gate_proj", (96, 64))
    parts |= packed_parts(f"{MLP}.up_proj", *asymmetric)
    groups = [
        group([f"{ATTENTION}.q_proj"], input_activations=INT8),
        group([f"{ATTENTION}.k_proj"], WEIGHTS | {"group_size": 16}, input_activations=FP8),
        group([f"{ATTENTION}.v_proj"], EIGHT, input_activations=INT8),
        group([f"{MLP}.gate_proj"], E4M3, input_activations=FP8),
        group([f"{MLP}.up_proj"], WEIGHTS | {"symmetric": False}),
    ]
    return ct_folder(tmp_path / "model", llama_config(), parts, groups, format="mixed-precision")


def test_each_layer_is_computed_by_its_own_scheme(mixed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    halfbyte.compile(mixed, out, halfbyte.CompileOptions(max_context=16, min_tokens=4))
    report = json.loads((out / "report.json").read_text())
    reasons = {row["name"]: row["reason"] for row in report["layers"]}
    assert "--min-tokens does not apply" in reasons[f"{MLP}.gate_proj"]
    assert reasons[f"{ATTENTION}.q_proj"] == ""
    modes = {row["name"]: row["mode"] for row in report["layers"]}
    assert modes == {
        f"{ATTENTION}.q_proj": "W4A8",
        f"{ATTENTION}.k_proj": "W4AFP8",
        f"{ATTENTION}.v_proj": "W8A8",
        f"{MLP}.gate_proj": "WFP8AFP8",
        f"{MLP}.up_proj": "W4A16",
    } | dict.fromkeys((f"{ATTENTION}.o_proj", f"{MLP}.down_proj", "lm_head"), "float")
    assert report["merged"] == {}
    for tokens in ([3, 5, 8, 13, 21], [3, 5, 8]):  # as many as --min-tokens says, and fewer
        assert verify(out, mixed, tokens=tokens).failures == ()
    plans = {layer.name: layer.plan for layer in halfbyte.inspect(mixed).layers}
    assert all(plans[name].startswith(mode) for name, mode in modes.items() if name in plans)


@pytest.mark.parametrize(
    ("activations", "refused"),
    [
        ("auto", []),
        ("none", []),
        ("int8", [f"{MLP}.gate_proj"]),
        ("fp8", [f"{ATTENTION}.v_proj"]),
    ],
)
def test_activations_that_do_not_go_with_a_weight(mixed: Path, activations: str, refused: list[str]) -> None:
    found = halfbyte.inspect(mixed, activations=activations)
    assert [layer.name for layer in found.layers if layer.plan.startswith("refused")] == refused
    allowed = halfbyte.inspect(mixed, activations=activations, on_unsupported="float")
    assert not [layer.name for layer in allowed.layers if layer.plan.startswith("refused")]
    kept = {layer.name: layer.activations for layer in allowed.layers}
    assert all(kept[name] == "none" for name in refused)


def test_activations_that_no_operator_computes_have_to_be_chosen(tmp_path: Path) -> None:
    name = f"{ATTENTION}.q_proj"
    codes, _, scales = signed_layer((64, 64), 2)
    asked = INT8 | {"strategy": "group", "group_size": 32}
    folder = ct_folder(
        tmp_path / "model", llama_config(), packed_parts(name, codes, None, scales),
        [group([name], input_activations=asked)],
    )  # fmt: skip
    with pytest.raises(UnsupportedLayerError, match=name) as error:
        halfbyte.compile(folder, tmp_path / "out")
    assert "int8 per group of 32" in str(error.value) and "--activations" in str(error.value)
    [plan] = [layer.plan for layer in halfbyte.inspect(folder).layers if layer.name == name]
    assert plan.startswith("refused: activations dynamic int8 per group of 32")
    [layer] = [each for each in halfbyte.inspect(folder, activations="int8").layers if each.name == name]
    assert (layer.activations, layer.plan.split(":")[0]) == ("int8", "W4A8")
