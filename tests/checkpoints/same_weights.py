"""The same logical weights saved in every format: a llama whose linears all have one scheme."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from made_checkpoints import (
    awq_parts,
    float_tensors,
    gptq_parts,
    linear_shapes,
    llama_config,
    packed_folder,
)
from made_compressed_tensors import WEIGHTS, ct_folder, group, int_parts, packed_parts
from made_gguf import metadata, write_gguf

GROUP = 32
_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@dataclass(frozen=True)
class Weights:
    """codes uint8 [N, K], zeros uint8 [N, G] and float16 scales [N, G] by layer, some negative."""

    bits: int
    symmetric: bool
    layers: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]


def random_weights(bits: int, symmetric: bool) -> Weights:
    random = np.random.default_rng(bits + symmetric)
    layers = {}
    for name, (outputs, inputs) in linear_shapes(llama_config()).items():
        codes = random.integers(0, 2**bits, (outputs, inputs))
        zeros = random.integers(0, 2**bits, (outputs, inputs // GROUP))
        if symmetric:
            zeros[:] = 2 ** (bits - 1)
        scales = random.uniform(0.01, 0.02, zeros.shape) * random.choice([-1, 1], zeros.shape) * 16 / 2**bits
        layers[name] = (codes, zeros, scales.astype(np.float16))
    return Weights(bits, symmetric, layers)


def _packed(folder: Path, weights: Weights, parts: Callable[..., dict[str, np.ndarray]], **said: Any) -> Path:
    made: dict[str, np.ndarray] = {}
    for name, layer in weights.layers.items():
        made |= parts(name, *layer)
    return packed_folder(folder, llama_config(), made, bits=weights.bits, sym=weights.symmetric, **said)


def _gptq(version: int, **said: Any) -> Callable[[Path, Weights], Path]:
    def write(folder: Path, weights: Weights) -> Path:
        def parts(name: str, *layer: np.ndarray) -> dict[str, np.ndarray]:
            return gptq_parts(name, *layer, version=version, bits=weights.bits)

        return _packed(folder, weights, parts, **said)

    return write


def _awq(**said: Any) -> Callable[[Path, Weights], Path]:
    return lambda folder, weights: _packed(folder, weights, awq_parts, **said)


def _awq_without_zeros(folder: Path, weights: Weights) -> Path:
    def parts(name: str, codes: np.ndarray, _: np.ndarray, scales: np.ndarray) -> dict[str, np.ndarray]:
        return awq_parts(name, codes, None, scales)

    return _packed(folder, weights, parts, quant_method="awq")


def _signed(weights: Weights, parts: Callable[..., dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    made: dict[str, np.ndarray] = {}
    middle = 2 ** (weights.bits - 1)
    for name, (codes, zeros, scales) in weights.layers.items():
        made |= parts(name, codes - middle, None if weights.symmetric else zeros - middle, scales)
    return made


def _ct_words(folder: Path, weights: Weights) -> Path:
    parts = _signed(weights, lambda *layer: packed_parts(*layer, bits=weights.bits))
    return ct_folder(folder, llama_config(), parts, [_group(weights)])


def _ct_bytes(folder: Path, weights: Weights) -> Path:
    return ct_folder(folder, llama_config(), _signed(weights, int_parts), [_group(weights)])


def _group(weights: Weights) -> dict[str, Any]:
    return group(["Linear"], WEIGHTS | {"num_bits": weights.bits, "symmetric": weights.symmetric})


def _auto_round_as_ct(folder: Path, weights: Weights) -> Path:
    said = {"bits": weights.bits, "group_size": GROUP, "sym": weights.symmetric}
    said |= {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"}
    return ct_folder(folder, llama_config(), _signed(weights, int_parts), **said)


def _gguf(folder: Path, weights: Weights) -> Path:
    """Q4_0 or Q8_0, with the rows of q and k in llama.cpp's order."""
    config, values, types = llama_config(), {}, {}
    kind = GGMLQuantizationType.Q4_0 if weights.bits == 4 else GGMLQuantizationType.Q8_0
    for name, value in float_tensors(config).items():
        base = name.removesuffix(".weight")
        ours = _GGUF.get(base) or f"blk.0.{_GGUF[base.removeprefix('model.layers.0.')]}"
        values[f"{ours}.weight"] = value.astype(np.float16 if value.ndim == 2 else np.float32)
        if base not in weights.layers:
            continue
        codes, _, scales = weights.layers[base]
        heads = {"q": "num_attention_heads", "k": "num_key_value_heads"}.get(ours[-1])
        rows = np.arange(len(codes))
        if heads is not None and ours.startswith("blk.0.attn"):
            rows = rows.reshape(config[heads], 2, -1).transpose(0, 2, 1).reshape(-1)
        blocks = codes[rows].reshape(len(codes), -1, GROUP).astype(np.uint8)
        octets = blocks[..., :16] | (blocks[..., 16:] << 4) if weights.bits == 4 else blocks ^ 128
        halves = scales[rows, :, None].view(np.uint8)
        types[f"{ours}.weight"] = (kind, np.concatenate([halves, octets], -1).reshape(len(codes), -1))
    keys = metadata("llama", **{"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0})
    return write_gguf(folder / "model.gguf", "llama", keys | {"llama.context_length": 64}, values, types)


ANY: dict[str, Callable[[Path, Weights], Path]] = {
    "gptq": _gptq(1),
    "gptq_v2": _gptq(2, checkpoint_format="gptq_v2"),
    "auto_round:auto_gptq": _gptq(1, quant_method="auto-round", packing_format="auto_round:auto_gptq"),
    "auto_round": _gptq(2, quant_method="auto-round", packing_format="auto_round"),
    "compressed-tensors, words": _ct_words,
    "compressed-tensors, bytes": _ct_bytes,
    "auto_round:llm_compressor": _auto_round_as_ct,
}
FOUR_BITS = {
    "awq": _awq(quant_method="awq"),
    "auto_round:auto_awq": _awq(quant_method="auto-round", packing_format="auto_round:auto_awq"),
}
SYMMETRIC = {"gguf": _gguf}


def writers(bits: int, symmetric: bool) -> dict[str, Callable[[Path, Weights], Path]]:
    """What can hold such weights, by name."""
    found = ANY | (FOUR_BITS if bits == 4 else {}) | (SYMMETRIC if symmetric else {})
    return found | ({"awq without zeros": _awq_without_zeros} if bits == 4 and symmetric else {})
