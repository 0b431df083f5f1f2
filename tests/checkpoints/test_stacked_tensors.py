"""Experts that files hold stacked, [E, ...]: the same layers as expert by expert, to the byte."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_experts import (
    Codes,
    Made,
    made_model,
    quantize,
    random_codes,
    random_fp8,
    write_experts,
    write_fp8_experts,
)
from safetensors.torch import load_file, save_file

from halfbyte.checkpoints import load_float_model, open_checkpoint
from halfbyte.errors import CheckpointError

TOKENS = [3, 9, 31, 0, 17, 8]
_BOTH, _DOWN = ("gate_proj", "up_proj"), ("down_proj",)


def made_and_written(
    folder: Path, family: str, packed: bool = True, symmetric: bool = False, **changes: Any
) -> tuple[Made, Path]:
    """Every expert of a projection with the same parts, as one stacked tensor needs them."""
    made = made_model(family, **changes)

    def alike(name: str, shape: tuple[int, int], seed: int) -> Codes:
        model = ".experts.0." if symmetric else ".experts.1."
        return random_codes(re.sub(r"\.experts\.\d+\.", model, name), shape, seed)

    quantize(made, lambda name: ".experts." in name, alike)
    return made, write_experts(folder, made, packed=packed)


def stack(folder: Path, joint: str = ".", interleaved: bool = False) -> list[str]:
    """Rewrites the file with all experts of a block in one tensor per part; the names made."""
    tensors = load_file(folder / "model.safetensors")
    made = {}
    blocks = {name.split(".experts.")[0] for name in tensors if ".experts." in name}
    for block in blocks:
        parts = {name.rpartition(".")[2] for name in tensors if name.startswith(f"{block}.experts.")}
        for stem, leaves in (("gate_up_proj", _BOTH), ("down_proj", _DOWN)):
            for part in parts - {"weight_shape"}:
                rows = []
                for expert in range(6):
                    own = [tensors[f"{block}.experts.{expert}.{leaf}.{part}"] for leaf in leaves]
                    rows.append(
                        torch.stack(own, 1).flatten(0, 1) if interleaved and len(own) > 1 else torch.cat(own)
                    )
                made[f"{block}.experts.{stem}{joint}{part}"] = torch.stack(rows)
    kept = {name: value for name, value in tensors.items() if ".experts." not in name}
    save_file(
        {name: value.contiguous() for name, value in (kept | made).items()}, folder / "model.safetensors"
    )
    return [*made]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("family", "joint", "wide"), [("mixtral", ".", 96), ("qwen2_moe", "_", 44)])
def test_quantized_stacks(tmp_path: Path, family: str, joint: str, wide: int, packed: bool) -> None:
    """Case 6: also with inputs of down (44) that fill no word of eight codes."""
    size = "intermediate_size" if family == "mixtral" else "moe_intermediate_size"
    made, folder = made_and_written(tmp_path, family, packed, symmetric=wide == 44, **{size: wide})
    names = stack(folder, joint)
    assert any(("weight_packed" in name) == packed for name in names)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.warnings == []
    for name, codes in made.codes.items():
        assert torch.equal(checkpoint.quantized(name).dequantize(), codes.dequantized()), name
    with torch.no_grad():
        own = load_float_model(checkpoint)(torch.tensor([TOKENS])).logits[0].numpy()
    want = made.logits(TOKENS)
    assert np.abs(own - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "granitemoe"])
def test_float_stacks_as_transformers_holds_them(tmp_path: Path, family: str) -> None:
    """[E, 2I, H] and [E, H, I]; of gpt-oss [E, H, 2I], gate and up in turns, [E, I, H] and biases; Granite's names."""
    made = made_model(family)
    quantize(made, lambda name: "q_proj" in name)
    made.tensors = {name: value for name, value in made.tensors.items() if ".experts." not in name}
    made.tensors |= {
        name: value.detach().clone() for name, value in made.model.named_parameters() if ".experts." in name
    }

    def real(name: str) -> str:
        if family != "granitemoe":
            return name
        name = name.replace(".experts.gate_up_proj", ".input_linear.weight").replace(
            ".router.", ".router.layer."
        )
        return name.replace(".experts.down_proj", ".output_linear.weight")

    folder = write_experts(tmp_path, made, rename=real)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.warnings == []
    with torch.no_grad():
        own = load_float_model(checkpoint)(torch.tensor([TOKENS])).logits[0].numpy()
    want = made.logits(TOKENS)
    assert np.abs(own - want).max() <= 1e-5 * np.abs(want).max()


def test_stacks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    _, folder = made_and_written(tmp_path, "mixtral")
    stack(folder)
    good = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj.weight_packed"
    for bad in (good[name][:5], good[name][:, :-1], good[name][0]):
        save_file(good | {name: bad.clone()}, folder / "model.safetensors")
        with pytest.raises(
            CheckpointError, match=r"gate_up_proj\.weight_packed: the stacked tensor"
        ) as error:
            open_checkpoint(folder)
        assert "[6, 192, ...]" in str(error.value)
    single = "model.layers.0.mlp.experts.3.up_proj.weight_packed"
    save_file(good | {single: good[name][3, 96:].clone()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="by itself and as part of a stacked one"):
        open_checkpoint(folder)


def test_e4m3_stacks(tmp_path: Path) -> None:
    """As transformers' FP8Experts hold them: scales of whole blocks of gate, then of up."""
    made = made_model("qwen3_moe", decoder_sparse_step=1, moe_intermediate_size=64)
    quantize(made, lambda name: ".experts." in name, random_fp8)
    folder = write_fp8_experts(tmp_path, made, (32, 16))
    names = stack(folder, "")
    assert "model.layers.0.mlp.experts.gate_up_projweight_scale_inv" in names
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("_projweight", "_proj"): value for name, value in tensors.items()}
    assert renamed["model.layers.0.mlp.experts.gate_up_proj_scale_inv"].shape == (6, 4, 4)
    save_file(renamed, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.warnings == []
    for name, layer in made.codes.items():
        torch.testing.assert_close(
            checkpoint.quantized(name).dequantize(), layer.dequantized(), rtol=0, atol=0
        )
    renamed["model.layers.0.mlp.experts.gate_up_proj_scale_inv"] = torch.ones(6, 3, 4)  # one for gate and up
    save_file(renamed, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="does not fit the model") as error:
        open_checkpoint(folder)
    assert "gate_up_proj_scale_inv" in str(error.value) and "[6, 3, 4]" in str(error.value)
