"""GGUF models made by hand: names, row orders, configurations, types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from independent_unpack import rotary_back
from made_gguf import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    VOCABULARY,
    WIDE,
    float_values,
    metadata,
    random_blocks,
    shapes,
    write_gguf,
)
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import halfbyte
from halfbyte.checkpoints import Checkpoint, build_model, load_float_model, open_checkpoint
from halfbyte.checkpoints.gguf_blocks import INTEGER
from halfbyte.errors import CheckpointError
from halfbyte.parameter_count import count_parameters
from halfbyte.passes.quant_linear import QuantLinear
from halfbyte.passes.scheme import Zero
from halfbyte.passes.tables import IntegerTable

BIASES = {f"blk.0.attn_{part}.bias": (HEADS if part == "q" else KV_HEADS) * HEAD_DIM for part in "qkv"}
EXTRA: dict[str, dict[str, tuple[int, ...]]] = {
    "llama": {},
    "qwen2": {name: (size,) for name, size in BIASES.items()},
    "qwen3": {"blk.0.attn_q_norm.weight": (HEAD_DIM,), "blk.0.attn_k_norm.weight": (HEAD_DIM,)},
}
NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
UP = "model.layers.0.mlp.up_proj"


def hf_name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, part, leaf = name.split(".")
    return f"model.layers.0.{PARTS[part]}.{leaf}"


def made(
    folder: Path,
    architecture: str = "llama",
    values: dict[str, np.ndarray] | None = None,
    types: dict[str, Any] | None = None,
    special: dict[str, Any] | None = None,
    **changes: Any,
) -> Checkpoint:
    values = float_values(EXTRA[architecture]) if values is None else values
    keys = metadata(architecture, **changes) | (special or {})
    return open_checkpoint(write_gguf(folder / "model.gguf", architecture, keys, values, types))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_float_tensors_of_every_architecture(tmp_path: Path, architecture: str, kind: str) -> None:
    values = float_values(EXTRA[architecture] | {"output.weight": (VOCABULARY, HIDDEN)})
    types = {name: GGMLQuantizationType[kind] for name in values if values[name].ndim == 2 and kind != "F32"}
    changes = {"attention.key_length": HEAD_DIM} if architecture == "qwen3" else {}
    checkpoint = made(tmp_path, architecture, values, types, **changes)
    assert checkpoint.warnings == []
    assert checkpoint.floats.keys() == {hf_name(name) for name in values}
    for name, value in values.items():
        found = checkpoint.float_tensor(hf_name(name))
        wanted = torch.from_numpy(value).to(found.dtype).float().numpy()
        if architecture == "llama" and name.startswith(("blk.0.attn_q.", "blk.0.attn_k.")):
            wanted = rotary_back(wanted, HEADS if "attn_q" in name else KV_HEADS)
        np.testing.assert_array_equal(found.float().numpy(), wanted)
        assert checkpoint.floats[hf_name(name)].dtype == found.dtype
    assert checkpoint.layers[UP].storage == f"gguf {kind.lower()}"
    load_float_model(checkpoint)


def test_biases_of_llama_are_put_back_like_the_rows(tmp_path: Path) -> None:
    extra = EXTRA["qwen2"] | {"blk.0.attn_output.bias": (HIDDEN,)}
    values = float_values(extra)
    checkpoint = made(tmp_path, "llama", values)
    assert checkpoint.config["attention_bias"] is True
    q, v = (checkpoint.float_tensor(f"model.layers.0.self_attn.{part}_proj.bias").numpy() for part in "qv")
    np.testing.assert_array_equal(q, rotary_back(values["blk.0.attn_q.bias"], HEADS))
    np.testing.assert_array_equal(v, values["blk.0.attn_v.bias"])


@pytest.mark.parametrize(("kind", "zero"), [("Q4_0", Zero.SYMMETRIC), ("Q4_1", Zero.MINIMUM)])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_int4_types(tmp_path: Path, kind: str, zero: Zero, architecture: str) -> None:
    values = float_values(EXTRA[architecture])
    types = {name: GGMLQuantizationType[kind] for name in values if "blk" in name and values[name].ndim == 2}
    checkpoint = made(tmp_path, architecture, values, types)
    for name, info in checkpoint.layers.items():
        weight = checkpoint.quantized(name)
        assert info.scheme == weight.scheme
        assert weight.scheme.zero is zero
        assert weight.scheme.scale_dtype == "f16"
        assert f"{name}.weight" not in checkpoint.floats
        assert info.bias == (architecture == "qwen2" and name.endswith(("q_proj", "k_proj", "v_proj")))
    q = checkpoint.quantized("model.layers.0.self_attn.q_proj").dequantize().numpy()
    wanted = values["blk.0.attn_q.weight"]
    wanted = rotary_back(wanted, HEADS) if architecture == "llama" else wanted
    assert np.corrcoef(q.flat, wanted.flat)[0, 1] > 0.99


def test_q8_0_linears_are_int8(tmp_path: Path) -> None:
    checkpoint = made(tmp_path, types={"blk.0.ffn_up.weight": GGMLQuantizationType.Q8_0})
    info = checkpoint.layers[UP]
    assert info.refusal is None
    assert info.storage == "gguf q8_0"
    assert info.scheme is not None
    assert (info.scheme.bits, info.scheme.group_size, info.scheme.zero) == (8, 32, Zero.SYMMETRIC)
    assert f"{UP}.weight" not in checkpoint.floats
    raw = checkpoint.tensors[f"{UP}.weight"].read().numpy()  # type: ignore[attr-defined]
    np.testing.assert_array_equal(
        checkpoint.quantized(UP).dequantize().numpy(), dequantize(raw, GGMLQuantizationType.Q8_0)
    )


@pytest.mark.parametrize("kind", [kind.upper() for kind in INTEGER])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_integer_types(tmp_path: Path, kind: str, architecture: str) -> None:
    """Every linear in one type, rows of llama's q and k in rotary order."""
    sizes = shapes(hidden=256, wide=512, head_dim=64)
    head = {"output.weight": (VOCABULARY, 256)}
    biases = {name: (size * 64 // HEAD_DIM,) for name, size in BIASES.items() if architecture == "qwen2"}
    values = float_values(head | biases, sizes=sizes)
    number = GGMLQuantizationType[kind]
    types: dict[str, Any] = {
        name: (number, random_blocks(kind, *value.shape, seed=at))
        for at, (name, value) in enumerate(values.items())
        if value.ndim == 2
    }
    changes = {"embedding_length": 256, "feed_forward_length": 512}
    checkpoint = made(tmp_path, architecture, values, types, **changes)
    assert checkpoint.warnings == []
    for name, (_, raw) in types.items():
        ours, wanted = hf_name(name).removesuffix(".weight"), dequantize(raw, number)
        if architecture == "llama" and "attn_q" in name:
            wanted = rotary_back(wanted, HEADS)
        if architecture == "llama" and "attn_k" in name:
            wanted = rotary_back(wanted, KV_HEADS)
        if name == "token_embd.weight":
            found = checkpoint.float_tensor(f"{ours}.weight")
        else:
            info, weight = checkpoint.layers[ours], checkpoint.quantized(ours)
            assert (info.storage, info.refusal) == (f"gguf {kind.lower()}", None)
            assert info.scheme == weight.scheme
            assert f"{ours}.weight" not in checkpoint.floats
            found = weight.dequantize()
        np.testing.assert_array_equal(found.numpy(), wanted)


@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0"])
def test_other_types_become_float_and_say_so(tmp_path: Path, kind: str) -> None:
    values = float_values(sizes=shapes(hidden=256, wide=512, head_dim=64))
    types = {"blk.0.ffn_up.weight": GGMLQuantizationType[kind]}
    changes = {"embedding_length": 256, "feed_forward_length": 512}
    checkpoint = made(tmp_path, values=values, types=types, **changes)
    info = checkpoint.layers[UP]
    assert (info.scheme, info.refusal) == (None, None)
    assert kind.lower() in info.reason
    raw = checkpoint.tensors[f"{UP}.weight"].read().numpy()  # type: ignore[attr-defined]
    wanted = dequantize(raw, GGMLQuantizationType[kind])
    np.testing.assert_array_equal(checkpoint.float_tensor(f"{UP}.weight").numpy(), wanted)


def test_types_that_cannot_be_dequantized(tmp_path: Path) -> None:
    raw = (GGMLQuantizationType.I8, np.zeros((WIDE, HIDDEN), np.int8))
    checkpoint = made(tmp_path / "linear", types={"blk.0.ffn_up.weight": raw})
    assert checkpoint.layers[UP].refusal is not None
    assert f"{UP}.weight" not in checkpoint.floats
    with pytest.raises(CheckpointError, match=UP):
        load_float_model(checkpoint)
    raw = (GGMLQuantizationType.I8, np.zeros((VOCABULARY, HIDDEN), np.int8))
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight"):
        made(tmp_path / "embedding", types={"token_embd.weight": raw})


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1"])
def test_a_tied_head_computes_with_the_codes_of_the_table(tmp_path: Path, kind: str) -> None:
    checkpoint = made(tmp_path, types={"token_embd.weight": GGMLQuantizationType[kind]})
    head = checkpoint.layers["lm_head"]
    assert (head.shape, head.storage) == ((VOCABULARY, HIDDEN), f"gguf {kind.lower()}")
    assert head.scheme is not None and head.shares == "model.embed_tokens.weight"
    table = checkpoint.float_tensor("model.embed_tokens.weight")
    assert torch.equal(checkpoint.quantized("lm_head").dequantize(), table)
    model = load_float_model(checkpoint)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    # The embedding is gathered from integers where one multiplication makes the value.
    assert list(checkpoint.tables) == ([] if kind == "Q5_1" else ["model.embed_tokens"])
    tied, own = (
        checkpoint,
        made(tmp_path / "own", values=float_values({"output.weight": (VOCABULARY, HIDDEN)})),
    )
    assert count_parameters(own).total - count_parameters(tied).total == VOCABULARY * HIDDEN
    assert halfbyte.inspect(tmp_path / "model.gguf").config["tie_word_embeddings"] is True
    built = build_model(checkpoint)
    assert isinstance(built.model.embed_tokens, torch.nn.Embedding if kind == "Q5_1" else IntegerTable)
    assert isinstance(built.lm_head, QuantLinear)


def test_quantized_embeddings_become_float(tmp_path: Path) -> None:
    checkpoint = made(tmp_path, types={"token_embd.weight": GGMLQuantizationType.Q5_1})
    assert checkpoint.float_tensor("model.embed_tokens.weight").dtype == torch.float32
    assert checkpoint.warnings == []


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_scales_that_are_no_numbers(tmp_path: Path, kind: str) -> None:
    number = GGMLQuantizationType[kind]
    raw = random_blocks(kind, WIDE, HIDDEN)
    raw[5, :2] = 0xFF  # a NaN
    checkpoint = made(tmp_path, types={"blk.0.ffn_up.weight": (number, raw)})
    with pytest.raises(CheckpointError, match=UP):
        checkpoint.quantized(UP)


def test_the_configuration(tmp_path: Path) -> None:
    special = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    checkpoint = made(tmp_path, special=special)
    assert checkpoint.config == {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    assert "lm_head" not in checkpoint.layers


def test_key_value_heads_per_block_and_linear_scaling(tmp_path: Path) -> None:
    changes = {
        "attention.head_count_kv": [KV_HEADS],
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 4.0,
    }
    config = made(tmp_path, **changes).config
    assert config["num_key_value_heads"] == KV_HEADS
    assert config["rope_parameters"] == {"rope_type": "linear", "rope_theta": 500000.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"block_count": None}, "llama.block_count"),
        ({"block_count": 10**6}, "num_hidden_layers"),
        ({"embedding_length": "64"}, "llama.embedding_length"),
        ({"attention.head_count": 0}, "llama.attention.head_count"),
        ({"attention.head_count_kv": [1, 2]}, "llama.attention.head_count_kv"),
        ({"attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon"),
        ({"rope.dimension_count": 8}, "rope.dimension_count"),
        ({"rope.scaling.type": "yarn"}, "rope.scaling.type"),
        ({"expert_count": 8}, "llama.expert_count"),
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, changes: dict[str, Any], name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        made(tmp_path, **changes)


@pytest.mark.parametrize("name", ["gemma", "gemma2", "phi3", "olmo2", "olmoe", "cohere2"])
def test_other_architectures(tmp_path: Path, name: str) -> None:
    """Also those that folders may have: their tensors are stored in ways of their own."""
    with pytest.raises(CheckpointError, match=r"accepted: llama, qwen2, qwen3$"):
        open_checkpoint(write_gguf(tmp_path / "model.gguf", name, metadata(name), float_values()))


def test_parts_of_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"split\.count"):
        made(tmp_path, special={"split.count": 2})


def llama3_factors(factor: float) -> np.ndarray:
    """The divisors of the frequencies, from transformers' own frequencies with and without the scaling."""
    shared = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "head_dim": HEAD_DIM}
    scaled = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain = LlamaConfig(**shared, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    frequencies = [
        LlamaRotaryEmbedding(config).inv_freq
        for config in (plain, LlamaConfig(**shared, rope_parameters=scaled))
    ]
    return (frequencies[0] / frequencies[1]).numpy()


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_scaling_is_found_again(tmp_path: Path, factor: float) -> None:
    factors = llama3_factors(factor)
    assert ((factors > 1.01) & (factors < factor - 0.01)).any()  # a frequency between the ends is there too
    values = float_values() | {"rope_freqs.weight": factors}
    checkpoint = made(tmp_path, values=values)
    assert checkpoint.warnings == []
    found = load_float_model(checkpoint).model.rotary_emb.inv_freq
    wanted = 500000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM) / factors
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5)


def test_rotary_factors_that_are_all_one(tmp_path: Path) -> None:
    values = float_values() | {"rope_freqs.weight": np.ones(HEAD_DIM // 2, np.float32)}
    assert made(tmp_path, values=values).config["rope_parameters"]["rope_type"] == "default"


@pytest.mark.parametrize(
    "factors", [np.linspace(1, 8, HEAD_DIM // 2), np.ones(3), np.full(HEAD_DIM // 2, np.nan)]
)
def test_unknown_rotary_factors_are_refused(tmp_path: Path, factors: np.ndarray) -> None:
    with pytest.raises(CheckpointError, match="rope_freqs"):
        made(tmp_path, values=float_values() | {"rope_freqs.weight": factors.astype(np.float32)})


def test_config_json_beside_is_compared(tmp_path: Path) -> None:
    beside = {
        "hidden_size": HIDDEN,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(beside))
    checkpoint = made(tmp_path)
    assert checkpoint.config["rms_norm_eps"] == 1e-6
    assert [text.split()[0] for text in checkpoint.warnings] == ["rms_norm_eps", "tie_word_embeddings"]
    assert all("the GGUF file decides" in text for text in checkpoint.warnings)


def test_missing_unknown_and_misshapen_tensors(tmp_path: Path) -> None:
    values = float_values()
    missing = {name: value for name, value in values.items() if name != "blk.0.ffn_up.weight"}
    with pytest.raises(CheckpointError, match=f"{UP}.weight is missing"):
        made(tmp_path / "missing", values=missing)
    checkpoint = made(tmp_path / "unknown", values=values | {"blk.0.strange.weight": np.ones(2, np.float32)})
    assert any("blk.0.strange.weight" in text for text in checkpoint.warnings)
    with pytest.raises(CheckpointError, match=f"{UP}.weight"):
        made(tmp_path / "shape", values=values | {"blk.0.ffn_up.weight": np.ones((WIDE, 32), np.float32)})
