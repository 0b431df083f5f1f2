"""Dense w4afp8 and fp8 checkpoints, and one weight in two storages, compiled and run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_checkpoints import linear_shapes, llama_config
from made_compressed_tensors import (
    INT8,
    ct_folder,
    group,
    int_parts,
    packed_parts,
    quantized_folder,
    signed_layer,
    w4afp8_parts,
)
from test_fp8 import parts as fp8_parts

import halfbyte
from halfbyte.check_layers import FP8_LIMIT
from halfbyte.checkpoints import load_float_model, open_checkpoint
from halfbyte.runtime.logits import all_logits
from halfbyte.verify_model import verify

TOKENS = [3, 9, 31, 0, 17, 8, 8, 30, 2, 2, 11, 5, 29, 1, 19, 23, 7]


@pytest.mark.parametrize("method", ["w4afp8", "fp8"])
def test_dense_layers(tmp_path: Path, method: str) -> None:
    """Case 33: N = 2112 is no multiple of 128, neither of int4 nor of e4m3 weights; 16.5 blocks of inputs."""
    config = llama_config(hidden_size=256, intermediate_size=2112, head_dim=64)
    parts: dict[str, Any] = {}
    for seed, (name, shape) in enumerate(linear_shapes(config).items()):
        blocks = (-(-shape[0] // 128), -(-shape[1] // 128))
        if method == "w4afp8" and name.endswith(("gate_proj", "up_proj")):
            codes, _, scales = signed_layer(shape, blocks[1], seed)
            parts |= w4afp8_parts(name, codes, scales / 16)
        else:
            made = fp8_parts(name, shape, blocks)
            made[f"{name}.weight_scale_inv"] /= 256
            parts |= made
    said = {"quant_method": method, "weight_block_size": [128, 128], "group_size": 128}
    model, out = quantized_folder(tmp_path / "model", config, parts, said), tmp_path / "out"
    assert open_checkpoint(model).warnings == []
    halfbyte.compile(model, out, halfbyte.CompileOptions(max_context=32))
    modes = {
        row["name"].rpartition(".")[2]: row["mode"]
        for row in json.loads((out / "report.json").read_text())["layers"]
    }
    wide = "W4AFP8" if method == "w4afp8" else "WFP8AFP8"
    assert modes == dict.fromkeys(["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"], "WFP8AFP8") | {
        "gate_proj": wide, "up_proj": wide, "lm_head": "float",
    }  # fmt: skip
    found = verify(out, model, tokens=TOKENS)
    assert found.failures == ()
    exact = [check for check in found.layers if "gate_proj" in check.name and method == "w4afp8"]
    assert all(check.equal for check in exact) and len(exact) == (method == "w4afp8")
    assert all(check.limit == FP8_LIMIT for check in found.layers if check not in exact)
    bundle = halfbyte.load(out)
    whole = all_logits(bundle, TOKENS)
    assert np.isfinite(whole).all()
    np.testing.assert_array_equal(all_logits(bundle, TOKENS[:1])[0], whole[0])


def test_float_activations_give_the_float_models_logits(tmp_path: Path) -> None:
    import torch

    config = llama_config()
    parts: dict[str, Any] = {}
    for name, shape in linear_shapes(config).items():
        made = fp8_parts(name, shape, (-(-shape[0] // 24), -(-shape[1] // 40)))
        made[f"{name}.weight_scale_inv"] /= 256
        parts |= made
    said = {"quant_method": "fp8", "weight_block_size": [24, 40]}
    model = quantized_folder(tmp_path / "model", config, parts, said)
    options = halfbyte.CompileOptions(max_context=32, activations="none")
    got = all_logits(halfbyte.load(halfbyte.compile(model, tmp_path / "out", options).path), TOKENS)
    with torch.no_grad():
        want = load_float_model(open_checkpoint(model))(torch.tensor([TOKENS])).logits[0].numpy()
    assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()


def test_one_weight_in_two_storages_gives_one_archive(tmp_path: Path) -> None:
    """Case 7: a byte for each 4-bit value in the file, four bits in the archive."""
    config = llama_config()
    archives = []
    for storage, make in (("words", packed_parts), ("bytes", int_parts)):
        parts: dict[str, Any] = {}
        for seed, (name, shape) in enumerate(linear_shapes(config).items()):
            codes, zeros, scales = signed_layer(shape, shape[1] // 32, seed)
            parts |= make(name, codes, zeros, scales / 8)
        one = group(["Linear"], {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 32},
                    input_activations=INT8)  # fmt: skip
        model = ct_folder(tmp_path / storage, config, parts, [one], ignore=["lm_head"])
        compiled = halfbyte.compile(
            model, tmp_path / f"{storage}-out", halfbyte.CompileOptions(max_context=16)
        )
        archives.append(compiled.manifest.parameters[0])
    assert archives[0] == archives[1]
    weights = sum(outputs * inputs for outputs, inputs in linear_shapes(config).values())
    codes_bytes = sum(part.bytes for key, part in archives[0].tensors.items() if key.endswith(".codes"))
    assert weights // 2 <= codes_bytes <= 1.15 * weights // 2  # N is padded to 64
