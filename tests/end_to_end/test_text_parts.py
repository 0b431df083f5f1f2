"""The text part of models of text and images: logits of the whole model, given text alone."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_experts import BASE, FAMILIES, Made, drawn, quantize, write_experts
from model_families import DENSE

import halfbyte
from halfbyte.checkpoints import load_float_model, open_checkpoint
from halfbyte.checkpoints.model_config import checked_config
from halfbyte.errors import CheckpointError
from halfbyte.lowering.decoder import export_decoder
from halfbyte.runtime.logits import all_logits
from halfbyte.verify_model import verify

TOKENS = [3, 9, 31, 0, 17, 8, 8, 40, 1, 2]
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN: dict[str, Any] = {
    "depth": 1,
    "num_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 16,
    "patch_size": 14,
}
_AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_KIMI = FAMILIES["deepseek_v3"]
# What is said of the text model, beside BASE, and of the images.
WHOLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        # The whole model does not bend logits.
        DENSE["gemma3_text"] | {"tie_word_embeddings": True, "final_logit_softcapping": None},
        {"vision_config": _VISION | {"vision_use_head": False}, "mm_tokens_per_image": 4},
    ),
    "mistral3": (
        {"model_type": "mistral", "sliding_window": None},
        {"vision_config": _VISION | {"model_type": "pixtral", "head_dim": 8}},
    ),
    "qwen2_5_vl": (
        {"rope_parameters": _AXES},
        {"vision_config": _QWEN | {"out_hidden_size": 64, "fullatt_block_indexes": [0]}},
    ),
    "qwen3_vl": (
        {"rope_parameters": _AXES | {"mrope_interleaved": True}},
        {"vision_config": _QWEN | {"out_hidden_size": 64, "deepstack_visual_indexes": [0]}},
    ),
    "kimi_k25": (
        {"model_type": "deepseek_v3"} | _KIMI,
        {"vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}},
    ),
}


def as_before(name: str) -> str:
    """Names of Gemma 3, Mistral 3 and Kimi K2.5 as they were published."""
    if name.startswith("model.language_model."):
        return name.replace("model.language_model.", "language_model.model.", 1)
    return f"language_model.{name}" if name.startswith("lm_head") else name.removeprefix("model.")


def of_qwen(name: str) -> str:
    """Names of Qwen2.5-VL as they were published."""
    return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")


def whole_model(kind: str) -> Made:
    from transformers import AutoConfig, AutoModelForImageTextToText

    text, rest = WHOLE[kind]
    said = copy.deepcopy({"text_config": BASE | text} | rest)  # transformers writes into what it is given
    config = AutoConfig.for_model(kind, **said)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = text.get(
        "tie_word_embeddings", False
    )
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()
    made = drawn(model, 3)
    quantize(made, lambda name: "language_model" in name and "_proj" in name)
    return made


def written(folder: Path, kind: str, rename: Callable[[str], str] = str) -> tuple[Made, np.ndarray]:
    made = whole_model(kind)
    write_experts(folder, made, rename=rename)
    return made, made.logits(TOKENS)


@pytest.mark.parametrize(
    ("kind", "rename"),
    [(kind, str) for kind in WHOLE]
    + [("gemma3", as_before), ("mistral3", as_before), ("kimi_k25", as_before), ("qwen2_5_vl", of_qwen)],
)
def test_logits_are_those_of_the_whole_model(tmp_path: Path, kind: str, rename: Callable[[str], str]) -> None:
    made, want = written(tmp_path, kind, rename)
    checkpoint = open_checkpoint(tmp_path)
    [warning] = checkpoint.warnings
    assert warning.startswith("only the text model is compiled")
    assert {name for name, info in checkpoint.layers.items() if info.scheme} == set(map(rename, made.codes))
    assert checkpoint.layers.keys() >= set(map(rename, made.codes))
    model = load_float_model(checkpoint)
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0]
        forward = export_decoder(model, 32)["forward"].module()(torch.tensor(TOKENS))
    for got in (logits.numpy(), forward.numpy()):
        assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


def test_a_compiled_one_with_a_tied_head(tmp_path: Path) -> None:
    made, want = written(tmp_path / "model", "gemma3", as_before)
    options = halfbyte.CompileOptions(max_context=32)
    halfbyte.compile(tmp_path / "model", tmp_path / "out", options)
    rows = {row["name"]: row for row in json.loads((tmp_path / "out" / "report.json").read_text())["layers"]}
    assert "shares the weight" in rows["language_model.lm_head"]["reason"]
    got = all_logits(halfbyte.load(tmp_path / "out"), TOKENS)
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
    found = verify(tmp_path / "out", tmp_path / "model", tokens=TOKENS)
    assert found.failures == () and len(found.layers) >= len(made.codes) // 2


def test_what_a_part_leaves_out_is_what_transformers_takes() -> None:
    """Gemma 3's published configuration has four numbers."""
    said = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    rope = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "model_type": "gemma3_text"}
    raw = {
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "text_config": said | rope,
        "eos_token_id": [1, 106],
    }
    config = checked_config(raw, "config.json")
    assert (config["num_attention_heads"], config["head_dim"], config["vocab_size"]) == (8, 256, 262208)
    assert config["rope_parameters"]["full_attention"]["factor"] == 8.0
    assert config["layer_types"][4:7] == ["sliding_attention", "full_attention", "sliding_attention"]
    assert (config["dtype"], config["eos_token_id"], config["tie_word_embeddings"]) == (
        "bfloat16",
        [1, 106],
        True,
    )


def test_flat_configurations_and_other_names() -> None:
    """Qwen2.5-VL's as it was published, and Kimi K2's, which is a DeepSeek-V3."""
    scaling = {"type": "mrope", "mrope_section": [2, 3, 3]}
    old = {key: value for key, value in BASE.items() if key != "rope_parameters"} | {"rope_theta": 1e6}
    flat = old | {"model_type": "qwen2_5_vl", "rope_scaling": scaling, "vision_config": {"depth": 1}}
    config = checked_config(flat, "config.json")
    nulled = checked_config(flat | {"text_config": None}, "config.json")
    assert {key: value for key, value in nulled.items() if key != "text_config"} == config
    assert config["model_type"] == "qwen2" and config["hidden_size"] == BASE["hidden_size"]
    assert config["rope_parameters"]["rope_theta"] == 1e6
    assert config["rope_parameters"]["rope_type"] == "default" and not config.get("rope_scaling")
    assert (
        checked_config(BASE | _KIMI | {"model_type": "kimi_k2"}, "config.json")["model_type"] == "deepseek_v3"
    )


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ({"model_type": "gemma3"}, "text_config is missing"),
        ({"model_type": "gemma3", "text_config": []}, "text_config is missing"),
        ({"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**12}}, "num_hidden_layers"),
        ({"model_type": "gemma3", "text_config": {"num_hidden_layers": "4"}}, "num_hidden_layers"),
        ({"model_type": "gemma3", "text_config": {"rms_norm_eps": "x", "layer_types": 3}}, "cannot read"),
        ({"model_type": "mistral3", "text_config": {"model_type": "mamba"}}, "not supported(.|\n)*mamba"),
        ({"model_type": "mistral3", "text_config": {"model_type": ["llama"]}}, "not supported"),
        ({"model_type": "mistral3", "text_config": BASE | {"vocab_size": -1}}, "vocab_size"),
    ],
)
def test_impossible_configurations(tmp_path: Path, raw: dict[str, Any], text: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=text):
        open_checkpoint(tmp_path)
