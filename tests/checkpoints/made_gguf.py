"""GGUF files made by hand with the gguf package's writer: a model of one block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

HIDDEN, WIDE, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 64, 96, 4, 2, 16, 32
# Where the float16 values of a block stand.
_HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)},
}


def shapes(hidden: int = HIDDEN, wide: int = WIDE, head_dim: int = HEAD_DIM) -> dict[str, tuple[int, ...]]:
    """Of the tensors, by name without ``.weight``."""
    return {
        "token_embd": (VOCABULARY, hidden),
        "output_norm": (hidden,),
        "blk.0.attn_norm": (hidden,),
        "blk.0.ffn_norm": (hidden,),
        "blk.0.attn_q": (HEADS * head_dim, hidden),
        "blk.0.attn_k": (KV_HEADS * head_dim, hidden),
        "blk.0.attn_v": (KV_HEADS * head_dim, hidden),
        "blk.0.attn_output": (hidden, HEADS * head_dim),
        "blk.0.ffn_gate": (wide, hidden),
        "blk.0.ffn_up": (wide, hidden),
        "blk.0.ffn_down": (hidden, wide),
    }


SHAPES = shapes()


def random_blocks(kind: str, outputs: int, inputs: int, seed: int = 0, size: float = 1.0) -> np.ndarray:
    """uint8 [outputs, row bytes] of a type: every bit random, but finite float16 values of about `size`."""
    values, octets = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (outputs, inputs // values, octets), np.uint8)
    for at in _HALVES[kind]:
        halves = np.clip(random.normal(size=(outputs, inputs // values, 1)) * size, -65504, 65504)
        raw[..., at : at + 2] = halves.astype("<f2").view(np.uint8)
    return raw.reshape(outputs, -1)


def metadata(architecture: str, **changes: Any) -> dict[str, Any]:
    """Keys without the prefix of the architecture; None leaves one out."""
    keys = {
        "block_count": 1,
        "embedding_length": HIDDEN,
        "feed_forward_length": WIDE,
        "context_length": 128,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 500000.0,
    } | changes
    return {f"{architecture}.{key}": value for key, value in keys.items() if value is not None}


def float_values(
    extra: dict[str, tuple[int, ...]] | None = None,
    seed: int = 0,
    sizes: dict[str, tuple[int, ...]] = SHAPES,
) -> dict[str, np.ndarray]:
    """float32 tensors by their names in the file; those in `extra` by their full names."""
    random = np.random.default_rng(seed)
    named = {f"{name}.weight": shape for name, shape in sizes.items()} | (extra or {})
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in named.items()}


def write_gguf(
    path: Path,
    architecture: str,
    keys: dict[str, Any],
    values: dict[str, np.ndarray],
    types: dict[str, GGMLQuantizationType | tuple[GGMLQuantizationType, np.ndarray]] | None = None,
) -> Path:
    """Writes a file.

    Args:
        keys: metadata, integers as uint32.
        values: float tensors; float32 unless `types` says a type to quantize to, or a type and raw rows.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(path, architecture)
    for key, value in keys.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, value in values.items():
        kind = (types or {}).get(name)
        if kind is None:
            writer.add_tensor(name, value)
        elif isinstance(kind, tuple):
            writer.add_tensor(name, kind[1], raw_dtype=kind[0])
        else:
            writer.add_tensor(name, quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
