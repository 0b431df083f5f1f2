"""Checkpoints with many experts and random weights, written layer by layer; halfbyte takes no part in it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file


@dataclass(frozen=True)
class LargeModel:
    """Sizes of a Qwen3-MoE; by default those of Qwen3-30B-A3B, but for the number of layers."""

    layers: int = 4
    hidden: int = 2048
    inner: int = 768
    experts: int = 128
    chosen: int = 8
    heads: int = 32
    key_heads: int = 4
    head_dim: int = 128
    dense: int = 6144
    vocabulary: int = 151936
    positions: int = 40960
    group: int = 128

    @property
    def expert_bytes(self) -> int:
        """Of the codes of all experts."""
        return self.layers * self.experts * 3 * self.hidden * self.inner // 2


def write_large_experts(folder: Path, model: LargeModel) -> None:
    """compressed-tensors W4A16, random words, a shard per layer."""
    folder.mkdir()
    random, weight_map = np.random.default_rng(0), {}
    hidden, inner = model.hidden, model.inner

    def linear(name: str, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
        words = random.integers(-(2**31), 2**31, (outputs, inputs // 8), dtype=np.int32)
        scales = random.uniform(0.002, 0.01, (outputs, inputs // model.group)).astype(np.float32)
        packed, scale = torch.from_numpy(words), torch.from_numpy(scales).bfloat16()
        return {f"{name}.weight_packed": packed, f"{name}.weight_scale": scale}

    def shard(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / name)
        weight_map.update(dict.fromkeys(tensors, name))

    draw = lambda *shape: torch.from_numpy(random.standard_normal(shape, np.float32) * 0.1).bfloat16()  # noqa: E731
    one = lambda size: torch.ones(size, dtype=torch.bfloat16)  # noqa: E731
    embedding, head = draw(model.vocabulary, hidden), draw(model.vocabulary, hidden)
    ends = {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": one(hidden)}
    shard("ends.safetensors", ends)
    queries, keys = model.heads * model.head_dim, model.key_heads * model.head_dim
    attention = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
    for number in range(model.layers):
        block = f"model.layers.{number}"
        norms = ("input_layernorm", "post_attention_layernorm")
        tensors = {f"{block}.{name}.weight": one(hidden) for name in norms}
        tensors |= {f"{block}.self_attn.{name}_norm.weight": one(model.head_dim) for name in "qk"}
        for name, shape in attention.items():
            tensors |= linear(f"{block}.self_attn.{name}_proj", *shape)
        tensors[f"{block}.mlp.gate.weight"] = draw(model.experts, hidden)
        for expert in range(model.experts):
            path = f"{block}.mlp.experts.{expert}"
            tensors |= linear(f"{path}.gate_proj", inner, hidden) | linear(f"{path}.up_proj", inner, hidden)
            tensors |= linear(f"{path}.down_proj", hidden, inner)
        shard(f"{number}.safetensors", tensors)
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": model.group,
    }
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": hidden,
        "intermediate_size": model.dense,
        "moe_intermediate_size": inner,
        "num_experts": model.experts,
        "num_experts_per_tok": model.chosen,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.key_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocabulary,
        "max_position_embeddings": model.positions,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ["lm_head", "re:.*mlp.gate$"],
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
