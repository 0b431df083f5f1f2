"""e2m1 weights made by hand: gpt-oss's MXFP4, ModelOpt's NVFP4, compressed-tensors' kinds that do not fit."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_checkpoints import DOWN_PROJ, Q_PROJ, float_tensors, llama_config, write_folder
from made_experts import made_model, quantize
from made_fp4 import Fp4Codes, random_mxfp4, random_nvfp4, write_mxfp4_experts
from safetensors.torch import load_file, save_file

from halfbyte.checkpoints import Checkpoint, load_float_model, open_checkpoint
from halfbyte.errors import CheckpointError
from halfbyte.passes.scheme import Activations

WIDE = {"hidden_size": 64, "intermediate_size": 96}


@pytest.fixture
def gpt_oss(tmp_path: Path) -> tuple[Path, Any]:
    made = made_model("gpt_oss", **WIDE)
    quantize(made, lambda name: ".experts." in name, random_mxfp4)
    return write_mxfp4_experts(tmp_path / "model", made), made


def test_experts_in_blocks(gpt_oss: tuple[Path, Any]) -> None:
    folder, made = gpt_oss
    checkpoint = open_checkpoint(folder)
    assert checkpoint.warnings == []
    assert made.codes.keys() == {name for name, info in checkpoint.layers.items() if info.scheme is not None}
    for name, codes in made.codes.items():
        info = checkpoint.layers[name]
        assert (info.storage, info.activations) == ("mxfp4", Activations.NONE)
        assert str(info.scheme) == "e2m1 symmetric, group 32, bf16 scales"
        weight = checkpoint.quantized(name)
        np.testing.assert_array_equal(weight.dequantize(), codes.dequantized())
        assert weight.scheme == info.scheme
        np.testing.assert_array_equal(checkpoint.float_tensor(f"{name}.bias"), made.tensors[f"{name}.bias"])
    tokens = torch.tensor([[3, 9, 31, 0, 17]])
    with torch.no_grad():
        np.testing.assert_array_equal(load_float_model(checkpoint)(tokens).logits, made.model(tokens).logits)


def test_transformers_reads_the_same(gpt_oss: tuple[Path, Any]) -> None:
    """Its own unpacking of blocks and scales."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder, made = gpt_oss
    stored = load_file(folder / "model.safetensors")
    path = "model.layers.0.mlp.experts"
    blocks, scales = (stored[f"{path}.down_proj_{part}"] for part in ("blocks", "scales"))
    found = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    for expert, one in enumerate(found):  # [E, I, H]
        assert torch.equal(one.T, made.codes[f"{path}.{expert}.down_proj"].dequantized())


def test_the_smallest_scales(gpt_oss: tuple[Path, Any]) -> None:
    """Half of 2^-126 is what kernels take for 0: of zeros it may be that, of other codes it is refused."""
    folder, made = gpt_oss
    stored, path = load_file(folder / "model.safetensors"), "model.layers.0.mlp.experts"
    codes, scales = (stored[f"{path}.down_proj_{part}"] for part in ("blocks", "scales"))
    codes[1, 3, 0], codes[1, 5, 1] = 0x80, 0x08
    scales[1, 3, 0], scales[1, 5, 1], scales[1, 6, 0] = 0, 1, 2
    save_file(stored, folder / "model.safetensors")
    weight = open_checkpoint(folder).quantized(f"{path}.1.down_proj").dequantize()
    assert not weight[3, :32].any() and not weight[5, 32:64].any()
    values = made.codes[f"{path}.1.down_proj"]
    exact = Fp4Codes(values.codes[6:7, :32], np.array([[2.0**-125]])).dequantized()
    assert exact.any() and torch.equal(weight[6:7, :32], exact)
    scales[1, 6, 0] = 1
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"down_proj.scales(.|\n)*output 6, group 0"):
        open_checkpoint(folder).quantized(f"{path}.1.down_proj")


@pytest.mark.parametrize(
    ("part", "change", "text"),
    [
        ("down_proj_scales", lambda value: value[:, :-1], "does not fit the model"),
        ("down_proj_blocks", lambda value: value[..., :8], "blocks does not fit"),
        ("gate_up_proj_blocks", lambda value: value.to(torch.int16), "uint8"),
        ("gate_up_proj_scales", lambda value: torch.full_like(value, 255), "scales that are no numbers"),
        ("down_proj_scales", None, "down_proj.scales"),
    ],
)
def test_damaged_blocks(gpt_oss: tuple[Path, Any], part: str, change: Any, text: str) -> None:
    folder, _ = gpt_oss
    stored, name = load_file(folder / "model.safetensors"), f"model.layers.0.mlp.experts.{part}"
    value = stored.pop(name)
    if change is not None:
        stored[name] = change(value).contiguous()
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=text):
        checkpoint = open_checkpoint(folder)
        checkpoint.quantized("model.layers.0.mlp.experts.2.gate_proj")


def test_exclusions_that_are_no_names(gpt_oss: tuple[Path, Any]) -> None:
    folder, _ = gpt_oss
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = "lm_head"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="modules_to_not_convert is impossible"):
        open_checkpoint(folder)


def nvfp4(name: str, codes: Fp4Codes, scales: np.ndarray, whole: float) -> dict[str, Any]:
    return {
        f"{name}.weight": codes.octets(),
        f"{name}.weight_scale": scales,
        f"{name}.weight_scale_2": np.array(whole, np.float32),
    }


def modelopt(folder: Path, parts: dict[str, Any], in_config: bool = False, **said: Any) -> Checkpoint:
    tensors = float_tensors(llama_config())
    for key in parts:
        tensors.pop(key, None)
    known = {"quant_algo": "NVFP4", "group_size": 16} | said
    if in_config:
        write_folder(folder, llama_config(), tensors | parts, {"quant_method": "modelopt"} | known)
    else:
        write_folder(folder, llama_config(), tensors | parts, None)
        text = json.dumps({"producer": {"name": "modelopt"}, "quantization": known})
        (folder / "hf_quant_config.json").write_text(text)
    return open_checkpoint(folder)


FLOATS = ["lm_head", "model.layers.0.self_attn.[kvo]*", "model.layers.0.mlp.gate_proj", "*up_proj"]


@pytest.mark.parametrize("in_config", [False, True])
def test_modelopt(tmp_path: Path, in_config: bool) -> None:
    down, scales = random_nvfp4((64, 96), 3)
    query, others = random_nvfp4((64, 64), 4)
    parts = nvfp4(DOWN_PROJ, down, scales, 0.001) | nvfp4(Q_PROJ, query, others, 0.25)
    key = "ignore" if in_config else "exclude_modules"
    checkpoint = modelopt(tmp_path, parts, in_config, **{key: FLOATS})
    assert checkpoint.warnings == []
    for name, codes, whole in ((DOWN_PROJ, down, 0.001), (Q_PROJ, query, 0.25)):
        info = checkpoint.layers[name]
        assert (info.storage, str(info.scheme)) == ("nvfp4", "e2m1 symmetric, group 16, f32 scales")
        assert info.refused_activations is None
        exact = codes.scales.astype(np.float32) * np.float32(whole)  # of float32s, rounded once
        want = Fp4Codes(codes.codes, exact.astype(np.float64)).dequantized()
        np.testing.assert_array_equal(checkpoint.quantized(name).dequantize(), want)


def test_modelopt_asks_for_activations_of_four_bits(tmp_path: Path) -> None:
    down, scales = random_nvfp4((64, 96), 3)
    parts = nvfp4(DOWN_PROJ, down, scales, 0.001) | {f"{DOWN_PROJ}.input_scale": np.array(0.1, np.float32)}
    checkpoint = modelopt(tmp_path, parts, exclude_modules=[*FLOATS, Q_PROJ])
    refused = checkpoint.layers[DOWN_PROJ].refused_activations
    assert refused is not None and "fp4" in refused.found and "--activations" in refused.advice


def test_modelopt_that_is_damaged(tmp_path: Path) -> None:
    down, scales = random_nvfp4((64, 96), 3)
    good = nvfp4(DOWN_PROJ, down, scales, 0.001)
    floats = [*FLOATS, Q_PROJ]
    for index, (part, value, text) in enumerate(
        [
            ("weight_scale_2", np.array(0, np.float32), "the scale of the whole tensor is 0"),
            ("weight_scale_2", np.array(np.nan, np.float32), "no numbers"),
            ("weight_scale", scales[:, :-1].copy(), "weight_scale does not fit"),
            ("weight", down.octets()[:, :-1].copy(), "weight does not fit"),
            ("weight_scale", np.full_like(scales, np.nan), "no numbers"),
        ]
    ):
        with pytest.raises(CheckpointError, match=text):
            parts = good | {f"{DOWN_PROJ}.{part}": value}
            modelopt(tmp_path / str(index), parts, exclude_modules=floats).quantized(DOWN_PROJ)
    with pytest.raises(CheckpointError, match="exclude_modules is impossible"):
        modelopt(tmp_path / "names", good, exclude_modules="lm_head")


def test_a_format_that_names_another_kind(data: Path, tmp_path: Path) -> None:
    """The tensors count: only NVFP4 has a scale of the whole tensor."""
    for source, said in (("llama-ct-nvfp4", "pack-quantized"), ("llama-ct-mxfp4", "nvfp4-pack-quantized")):
        folder = tmp_path / source
        shutil.copytree(data / source, folder)
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"]["format"] = said
        for group in config["quantization_config"]["config_groups"].values():
            group["format"] = said
        (folder / "config.json").write_text(json.dumps(config))
        checkpoint = open_checkpoint(folder)
        assert {info.storage for info in checkpoint.layers.values()} == {
            source.rpartition("-")[2],
            "float bf16",
        }


@pytest.mark.parametrize("source", ["llama-ct-nvfp4", "llama-ct-mxfp4"])
def test_codes_in_words(data: Path, tmp_path: Path, source: str) -> None:
    """The error names the tensor, not the width, which is one that is read."""
    folder = tmp_path / source
    shutil.copytree(data / source, folder)
    stored = load_file(folder / "model.safetensors")
    name = next(name for name in stored if name.endswith(".weight_packed"))
    stored[name] = stored[name].view(torch.int32)
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)}(.|\n)*int32(.|\n)*uint8"):
        open_checkpoint(folder)


def test_widths_without_whole_groups(tmp_path: Path) -> None:
    config = llama_config(intermediate_size=88)
    codes = random_mxfp4(DOWN_PROJ, (64, 96), 1)
    parts = {f"{DOWN_PROJ}.weight_packed": codes.octets()[:, :44].copy()}
    parts[f"{DOWN_PROJ}.weight_scale"] = codes.exponents()
    tensors = float_tensors(config) | parts
    del tensors[f"{DOWN_PROJ}.weight"]
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    said = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    groups = {"group_0": {"targets": [DOWN_PROJ], "weights": weights}}
    write_folder(tmp_path, config, tensors, said | {"config_groups": groups})
    with pytest.raises(CheckpointError, match=r"mxfp4 has groups of 32 inputs(.|\n)*88 inputs"):
        open_checkpoint(tmp_path)
