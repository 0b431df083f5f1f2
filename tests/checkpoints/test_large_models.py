"""Models of real size: looking at headers is quick, whatever the size of the weights."""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_checkpoints import llama_config

import halfbyte

LARGE = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
SIZES = {"I32": 4, "F16": 2, "I64": 8, "I8": 1, "F8_E4M3": 1, "F32": 4}
Tensors = dict[str, tuple[str, list[int]]]
SHARDS = 15


def gptq_parts(outputs: int, inputs: int) -> Tensors:
    return {
        "qweight": ("I32", [inputs // 8, outputs]),
        "qzeros": ("I32", [inputs // 128, outputs // 8]),
        "g_idx": ("I32", [inputs]),
        "scales": ("F16", [inputs // 128, outputs]),
    }


def packed_parts(outputs: int, inputs: int) -> Tensors:
    return {
        "weight_packed": ("I32", [outputs, inputs // 8]),
        "weight_zero_point": ("I32", [outputs // 8, inputs // 128]),
        "weight_g_idx": ("I32", [inputs]),
        "weight_scale": ("F16", [outputs, inputs // 128]),
        "weight_shape": ("I64", [2]),
    }


def fp8_parts(outputs: int, inputs: int) -> Tensors:
    return {
        "weight": ("F8_E4M3", [outputs, inputs]),
        "weight_scale_inv": ("F32", [outputs // 128, inputs // 128]),
    }


def tensors_of(parts: Callable[[int, int], Tensors]) -> Tensors:
    """dtype and shape of the tensors of a llama of 70 billion weights, in groups of 128."""
    hidden, wide, shared = 8192, 28672, 1024
    linears = {
        **{f"self_attn.{part}_proj": (hidden, hidden) for part in "qo"},
        **{f"self_attn.{part}_proj": (shared, hidden) for part in "kv"},
        **{f"mlp.{part}_proj": (wide, hidden) for part in ("gate", "up")},
        "mlp.down_proj": (hidden, wide),
    }
    made: Tensors = {}
    for number in range(80):
        block = f"model.layers.{number}"
        for name, (outputs, inputs) in linears.items():
            made |= {f"{block}.{name}.{part}": value for part, value in parts(outputs, inputs).items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            made[f"{block}.{norm}.weight"] = ("F16", [hidden])
    made["model.norm.weight"] = ("F16", [hidden])
    made["model.embed_tokens.weight"] = made["lm_head.weight"] = ("F16", [128256, hidden])
    return made


def content(name: str, tensors: Tensors) -> bytes | None:
    """What is written of a tensor: a g_idx, or the shape of a layer."""
    if name.endswith("g_idx"):
        return (np.arange(tensors[name][1][0], dtype="<i4") // 128).tobytes()
    if name.endswith(".weight_shape"):
        outputs, words = tensors[name.replace("shape", "packed")][1]
        return np.array([outputs, 8 * words], "<i8").tobytes()
    return None


def write_sparse(folder: Path, tensors: Tensors) -> None:
    """Shards with an index; most of their data are holes, which read as zeros."""
    names, weight_map = list(tensors), {}
    per_shard = -(-len(names) // SHARDS)
    for shard in range(SHARDS):
        file, header, end = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors", {}, 0
        for name in names[shard * per_shard : (shard + 1) * per_shard]:
            dtype, shape = tensors[name]
            start, end = end, end + SIZES[dtype] * math.prod(shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
            weight_map[name] = file
        blob = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(blob)) + blob)
            out.truncate(8 + len(blob) + end)
            for name, entry in header.items():
                if (octets := content(name, tensors)) is not None:
                    out.seek(8 + len(blob) + entry["data_offsets"][0])
                    out.write(octets)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False}
GROUP = {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 128, "actorder": "group"}
PACKED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": GROUP}},
    "ignore": ["lm_head"],
}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
INT4 = "int4 integer, group 128, f16 scales"


@pytest.mark.parametrize(
    ("quantization", "parts", "scheme"),
    [
        (GPTQ, gptq_parts, INT4),
        (PACKED, packed_parts, INT4),
        (BLOCKS, fp8_parts, "e4m3, blocks of 128x128, f32 scales"),
    ],
)
def test_inspecting_70_billion_weights_takes_less_than_two_seconds(
    tmp_path: Path, quantization: dict[str, Any], parts: Callable[[int, int], Tensors], scheme: str
) -> None:
    config = llama_config(**LARGE) | {"quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_sparse(tmp_path, tensors_of(parts))
    began = time.process_time()
    found = halfbyte.inspect(tmp_path)
    assert time.process_time() - began < 2
    assert next((group.pattern, group.count) for group in found.groups) == (
        "model.layers.*.self_attn.q_proj",
        80,
    )
    assert sum(group.count for group in found.groups) == 561
    assert {layer.scheme for layer in found.layers} == {scheme, "float"}
    assert sum(layer.shape[0] * layer.shape[1] for layer in found.layers) > 69e9
