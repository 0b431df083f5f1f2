"""Small checkpoints made by hand: a llama of one layer with float or quantized linears."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Q_PROJ, K_PROJ = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
DOWN_PROJ = "model.layers.0.mlp.down_proj"


def llama_config(**changes: Any) -> dict[str, Any]:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 32,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
    }
    return config | changes


def linear_shapes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """(N, K) of the linears of the only layer."""
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    q, kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    attention = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
    dense = {"gate_proj": (wide, hidden), "up_proj": (wide, hidden), "down_proj": (hidden, wide)}
    return {f"model.layers.0.self_attn.{name}": shape for name, shape in attention.items()} | {
        f"model.layers.0.mlp.{name}": shape for name, shape in dense.items()
    }


def float_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """float16 tensors of the whole model, without lm_head."""
    random = np.random.default_rng(seed)
    hidden = config["hidden_size"]
    made = {
        "model.embed_tokens.weight": random.normal(size=(config["vocab_size"], hidden)),
        "model.norm.weight": np.ones(hidden),
        "model.layers.0.input_layernorm.weight": np.ones(hidden),
        "model.layers.0.post_attention_layernorm.weight": np.ones(hidden),
    }
    made |= {f"{name}.weight": random.normal(size=shape) for name, shape in linear_shapes(config).items()}
    return {name: value.astype(np.float16) for name, value in made.items()}


def pack(codes: np.ndarray, bits: int = 4) -> np.ndarray:
    """[R, C] values -> int32 [R, ceil(C * bits / 32)], lowest bits first, zero padding."""
    per_word = 32 // bits
    words = []
    for row in codes.tolist():
        row = row + [0] * (-len(row) % per_word)
        parts = [row[at : at + per_word] for at in range(0, len(row), per_word)]
        words.append([sum(value << (bits * place) for place, value in enumerate(part)) for part in parts])
    return np.array(words, np.uint32).view(np.int32)


def gptq_parts(
    name: str,
    codes: np.ndarray,
    zeros: np.ndarray,
    scales: np.ndarray,
    *,
    version: int = 1,
    bits: int = 4,
    g_idx: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """The tensors of one layer from codes [N, K], zeros [N, G], scales [N, G]."""
    words = pack(zeros.T, bits).view(np.uint32).astype(np.uint64)
    if version == 1:
        words = words - np.uint64(sum(1 << start for start in range(0, 32, bits)))
    parts = {
        "qweight": np.ascontiguousarray(pack(codes, bits).T),
        "qzeros": (words & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32),
        "scales": np.ascontiguousarray(scales.T).astype(np.float16),
    }
    if g_idx is not None:
        parts["g_idx"] = g_idx.astype(np.int32)
    return {f"{name}.{part}": value for part, value in parts.items()}


def awq_parts(
    name: str, codes: np.ndarray, zeros: np.ndarray | None, scales: np.ndarray
) -> dict[str, np.ndarray]:
    """The tensors of one AWQ layer from codes [N, K], zeros [N, G], scales [N, G]."""

    def words(rows: np.ndarray) -> np.ndarray:
        padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 8)))
        order = [8 * (at // 8) + (0, 2, 4, 6, 1, 3, 5, 7)[at % 8] for at in range(padded.shape[1])]
        return pack(padded[:, order])

    parts = {"qweight": words(codes.T), "scales": np.ascontiguousarray(scales.T).astype(np.float16)}
    if zeros is not None:
        parts["qzeros"] = words(zeros.T)
    return {f"{name}.{part}": value for part, value in parts.items()}


def random_layer(shape: tuple[int, int], groups: int, seed: int = 1, bits: int = 4) -> tuple[np.ndarray, ...]:
    """codes [N, K], zeros [N, G] and scales [N, G] (some negative), all different."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 2**bits, shape)
    zeros = random.integers(0, 2**bits, (shape[0], groups))
    scales = random.uniform(0.01, 0.2, zeros.shape) * random.choice([-1, 1], zeros.shape)
    return codes, zeros, scales.astype(np.float16)


def dequantized(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group: np.ndarray) -> np.ndarray:
    return (codes - zeros[:, group]).astype(np.float32) * scales.astype(np.float32)[:, group]


def write_folder(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    quantization: dict[str, Any] | None = None,
) -> Path:
    """config.json (with `quantization` inside) and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    if quantization is not None:
        config = config | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


def packed_folder(
    folder: Path, config: dict[str, Any], parts: dict[str, np.ndarray], **quantization: Any
) -> Path:
    """A folder whose layers in `parts` are quantized (as GPTQ, if nothing else is said) and whose others are float."""
    tensors = float_tensors(config) | parts
    for name in {key.rpartition(".")[0] for key in parts if key.endswith(".qweight")}:
        tensors.pop(f"{name}.weight", None)
    said = {"quant_method": "gptq", "bits": 4, "group_size": 32} | quantization
    return write_folder(folder, config, tensors, said)
