"""GGUF files made by hand with the gguf package's writer: a model of one block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

HIDDEN, WIDE, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 64, 96, 4, 2, 16, 32
SHAPES = {
    "token_embd": (VOCABULARY, HIDDEN),
    "output_norm": (HIDDEN,),
    "blk.0.attn_norm": (HIDDEN,),
    "blk.0.ffn_norm": (HIDDEN,),
    "blk.0.attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "blk.0.ffn_gate": (WIDE, HIDDEN),
    "blk.0.ffn_up": (WIDE, HIDDEN),
    "blk.0.ffn_down": (HIDDEN, WIDE),
}


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


def float_values(extra: dict[str, tuple[int, ...]] | None = None, seed: int = 0) -> dict[str, np.ndarray]:
    """float32 tensors by their names in the file; those in `extra` by their full names."""
    random = np.random.default_rng(seed)
    shapes = {f"{name}.weight": shape for name, shape in SHAPES.items()} | (extra or {})
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


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
