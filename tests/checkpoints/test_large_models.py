"""Models of real size: looking at headers is quick, whatever the size of the weights."""

from __future__ import annotations

import json
import math
import struct
import time
from pathlib import Path

import numpy as np
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
SIZES = {"I32": 4, "F16": 2}
SHARDS = 15


def gptq_tensors() -> dict[str, tuple[str, list[int]]]:
    """dtype and shape of the tensors of a llama of 70 billion weights, in groups of 128."""
    hidden, wide, shared = 8192, 28672, 1024
    linears = {
        **{f"self_attn.{part}_proj": (hidden, hidden) for part in "qo"},
        **{f"self_attn.{part}_proj": (shared, hidden) for part in "kv"},
        **{f"mlp.{part}_proj": (wide, hidden) for part in ("gate", "up")},
        "mlp.down_proj": (hidden, wide),
    }
    made: dict[str, tuple[str, list[int]]] = {}
    for number in range(80):
        block = f"model.layers.{number}"
        for name, (outputs, inputs) in linears.items():
            made[f"{block}.{name}.qweight"] = ("I32", [inputs // 8, outputs])
            made[f"{block}.{name}.qzeros"] = ("I32", [inputs // 128, outputs // 8])
            made[f"{block}.{name}.g_idx"] = ("I32", [inputs])
            made[f"{block}.{name}.scales"] = ("F16", [inputs // 128, outputs])
        for norm in ("input_layernorm", "post_attention_layernorm"):
            made[f"{block}.{norm}.weight"] = ("F16", [hidden])
    made["model.norm.weight"] = ("F16", [hidden])
    made["model.embed_tokens.weight"] = made["lm_head.weight"] = ("F16", [128256, hidden])
    return made


def write_sparse(folder: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    """Shards with an index; their data but g_idx are holes, which read as zeros."""
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
            for name in (name for name in header if name.endswith(".g_idx")):
                out.seek(8 + len(blob) + header[name]["data_offsets"][0])
                out.write((np.arange(tensors[name][1][0], dtype="<i4") // 128).tobytes())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_inspecting_70_billion_weights_takes_less_than_two_seconds(tmp_path: Path) -> None:
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False}
    config = llama_config(**LARGE) | {"quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_sparse(tmp_path, gptq_tensors())
    began = time.process_time()
    found = halfbyte.inspect(tmp_path)
    assert time.process_time() - began < 2
    assert next((group.pattern, group.count) for group in found.groups) == (
        "model.layers.*.self_attn.q_proj",
        80,
    )
    assert sum(group.count for group in found.groups) == 561
    assert {layer.scheme for layer in found.layers} == {"int4 integer, group 128, f16 scales", "float"}
    assert sum(layer.shape[0] * layer.shape[1] for layer in found.layers) > 69e9
