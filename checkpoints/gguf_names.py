"""GGUF tensor names and the order of their rows, in terms of Hugging Face models."""

from __future__ import annotations

import re

import torch

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IN_BLOCK = re.compile(r"blk\.(\d{1,6})\.(\w+)")


def model_name(name: str) -> str | None:
    """The Hugging Face name, ``blk.0.attn_q.weight`` -> ``model.layers.0.self_attn.q_proj.weight``.

    None for a name that has none.
    """
    base, _, leaf = name.rpartition(".")
    if leaf not in ("weight", "bias"):
        return None
    if base in _OUTER:
        return f"{_OUTER[base]}.{leaf}"
    match = _IN_BLOCK.fullmatch(base)
    if match is None or match[2] not in _BLOCK:
        return None
    return f"model.layers.{int(match[1])}.{_BLOCK[match[2]]}.{leaf}"


def rotary_rows(outputs: int, heads: int) -> torch.Tensor:
    """int64 [N]: the file's row for each Hugging Face row of a llama q or k projection.

    The converters to GGUF store the two halves of each head interleaved, for a rotation of neighbours;
    Hugging Face rotates halves.
    """
    return torch.arange(outputs).reshape(heads, outputs // heads // 2, 2).transpose(1, 2).reshape(-1)
