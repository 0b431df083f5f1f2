"""Folders as a whole: names that do not fit, tied heads, float models, configurations that mean harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_checkpoints import (
    K_PROJ,
    Q_PROJ,
    float_tensors,
    gptq_parts,
    llama_config,
    random_layer,
    write_folder,
)

from halfbyte.checkpoints import load_float_model, open_checkpoint
from halfbyte.errors import CheckpointError

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def test_a_float_folder(tmp_path: Path) -> None:
    tensors = float_tensors(llama_config())
    checkpoint = open_checkpoint(write_folder(tmp_path, llama_config(), tensors))
    assert checkpoint.format == "float"
    assert all(info.scheme is None and info.storage == "float f16" for info in checkpoint.layers.values())
    assert checkpoint.floats.keys() == tensors.keys()
    assert len(checkpoint.layers) == 7
    assert checkpoint.permutation(Q_PROJ) is None
    for name, value in tensors.items():
        np.testing.assert_array_equal(checkpoint.float_tensor(name).numpy(), value)
    with pytest.raises(KeyError):
        checkpoint.quantized(Q_PROJ)
    with pytest.raises(KeyError):
        checkpoint.float_tensor("model.layers.9.mlp.up_proj.weight")


@pytest.mark.parametrize(
    ("tied", "head", "ends_tied", "warns"),
    [
        (True, None, True, False),
        (True, "equal", True, False),
        (True, "other", False, True),
        (False, "equal", False, False),
        (False, "other", False, False),
    ],
)
def test_tied_heads(tmp_path: Path, tied: bool, head: str | None, ends_tied: bool, warns: bool) -> None:
    """Cases 73 and 74."""
    config = llama_config(tie_word_embeddings=tied)
    tensors = float_tensors(config)
    if head is not None:
        tensors[HEAD] = tensors[EMBEDDING] + np.float16(head == "other")
    checkpoint = open_checkpoint(write_folder(tmp_path, config, tensors))
    assert checkpoint.config["tie_word_embeddings"] == ends_tied
    assert ("lm_head" in checkpoint.layers) == (head is not None)
    assert any("lm_head" in text for text in checkpoint.warnings) == warns
    model = load_float_model(checkpoint)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == ends_tied
    np.testing.assert_array_equal(
        model.lm_head.weight.numpy(), tensors.get(HEAD, tensors[EMBEDDING]).astype("f4")
    )


def test_an_untied_head_that_is_absent(tmp_path: Path) -> None:
    config = llama_config(tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=HEAD):
        open_checkpoint(write_folder(tmp_path, config, float_tensors(config)))


def test_a_quantized_head_unties(tmp_path: Path) -> None:
    config = llama_config()
    tensors = float_tensors(config) | gptq_parts("lm_head", *random_layer((32, 64), 2))
    quantization = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "lm_head": True,
        "dynamic": {"-:model.*": {}},
    }
    checkpoint = open_checkpoint(write_folder(tmp_path, config, tensors, quantization))
    assert checkpoint.config["tie_word_embeddings"] is False
    assert checkpoint.layers["lm_head"].scheme is not None
    (warning,) = checkpoint.warnings
    assert "quantized lm_head" in warning


def test_doubled_prefixes_show_the_nearest_names(tmp_path: Path) -> None:
    """Case 75."""
    doubled = {
        f"language_model.language_model.{name}": value
        for name, value in float_tensors(llama_config()).items()
    }
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(write_folder(tmp_path, llama_config(), doubled))
    assert f"nearest names: language_model.language_model.{EMBEDDING}, " in str(error.value)
    assert str(error.value).count("language_model.language_model") == 3


def test_a_missing_quantized_layer_shows_the_nearest_names(tmp_path: Path) -> None:
    tensors = float_tensors(llama_config())
    del tensors[f"{K_PROJ}.weight"]
    with pytest.raises(CheckpointError, match=f"{K_PROJ}.qweight is missing") as error:
        open_checkpoint(write_folder(tmp_path, llama_config(), tensors, {"quant_method": "gptq", "bits": 4}))
    assert "nearest names" in str(error.value)


def test_unused_tensors_give_one_warning(tmp_path: Path) -> None:
    tensors = float_tensors(llama_config())
    tensors |= {f"vision.{number}.weight": np.zeros(2, np.float16) for number in range(9)}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float16)
    (warning,) = open_checkpoint(write_folder(tmp_path, llama_config(), tensors)).warnings
    assert "vision." in warning
    assert "and 4 more" in warning


@pytest.mark.parametrize("value", [np.zeros((64, 63), np.float16), np.zeros((64, 64), np.int32)])
def test_a_float_tensor_that_does_not_fit(tmp_path: Path, value: np.ndarray) -> None:
    tensors = float_tensors(llama_config()) | {f"{Q_PROJ}.weight": value}
    with pytest.raises(CheckpointError, match=f"{Q_PROJ}.weight") as error:
        open_checkpoint(write_folder(tmp_path, llama_config(), tensors))
    assert "[64, 64]" in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "bloom"},
        {"model_type": "bert"},
        {"model_type": None},
        {"model_type": ["llama"]},
        {"hidden_size": "64"},
        {"hidden_size": 2**40},
        {"hidden_size": -64},
        {"hidden_size": 64.0},
        {"num_hidden_layers": 10**9},
        {"vocab_size": None},
        {"num_attention_heads": 0},
        {"num_attention_heads": 3, "num_key_value_heads": 2},
        {"head_dim": 15},
        {"head_dim": None, "hidden_size": 66},
        {"rms_norm_eps": "small"},
        {"hidden_act": "nothing"},
        {"hidden_act": 4},
        {"rope_parameters": [1]},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
        {"rope_parameters": {"rope_type": ["default"]}},
        {"rope_parameters": {"rope_type": "yarn"}},
        {"rope_parameters": {"full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default"},
                "sliding_attention": {"type": "ntk"},
            }
        },
        {"model_type": "gemma", "use_bidirectional_attention": True},
        {"is_causal": False},
        {"is_causal": "no"},
        {"dtype": "float8"},
        {"dtype": 4},
        {"torch_dtype": ["float16"]},
        {"attention_bias": "yes"},
    ],
)
def test_impossible_configurations(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = write_folder(tmp_path, llama_config() | change, float_tensors(llama_config()))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(folder)


def test_no_foreign_code_is_looked_for(tmp_path: Path) -> None:
    config = llama_config(
        auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
        attn_implementation="somebody/kernel",
        _attn_implementation="somebody/kernel",
    )
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    checkpoint = open_checkpoint(write_folder(tmp_path, config, float_tensors(config)))
    assert not {"auto_map", "attn_implementation", "_attn_implementation"} & checkpoint.config.keys()
    assert load_float_model(checkpoint).config._attn_implementation == "sdpa"


@pytest.mark.parametrize("text", ["", "[]", "{", "nul", '{"a": 1, "a": 2}', "[" * 100000, "\udcff"])
def test_a_config_json_that_is_none(tmp_path: Path, text: str) -> None:
    folder = write_folder(tmp_path, llama_config(), float_tensors(llama_config()))
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(folder)


def test_torch_dtype_is_kept_under_its_new_name(tmp_path: Path) -> None:
    config = llama_config(torch_dtype="bfloat16")
    checkpoint = open_checkpoint(write_folder(tmp_path, config, float_tensors(config)))
    assert checkpoint.config["dtype"] == "bfloat16"
    assert load_float_model(checkpoint, torch.bfloat16).dtype == torch.bfloat16


def test_config_json_is_never_changed(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, llama_config(), float_tensors(llama_config()))
    before = (folder / "config.json").read_bytes()
    open_checkpoint(folder)
    assert (folder / "config.json").read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads(before) == llama_config()
