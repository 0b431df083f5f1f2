"""Families of dense models, each with what sets it apart: configurations beside made_experts.BASE."""

from __future__ import annotations

from typing import Any

_WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_HALF = {"partial_rotary_factor": 0.5}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}

DENSE: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "mistral windowed": {"sliding_window": 4},
    "ministral": _WINDOWS,
    "qwen2 windowed": _WINDOWS | {"use_sliding_window": True},
    "phi": _HALF,
    "phi3": {"sliding_window": None, "pad_token_id": 0},
    "gemma": {"hidden_activation": "gelu_pytorch_tanh"},
    "gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0},
    "gemma3_text": _WINDOWS
    | {"query_pre_attn_scalar": 24, "final_logit_softcapping": 3.0}
    | {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE | {"rope_theta": 1e3}}},
    "olmo": {"clip_qkv": 2.0},
    "olmo2": {},
    "olmo3": _WINDOWS,
    "smollm3": {"no_rope_layers": [1, 0], "pad_token_id": 0},
    "glm": _HALF | {"attention_bias": True, "pad_token_id": 0},
    "glm4": _HALF | {"pad_token_id": 0},
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
    },
    "cohere": {"use_qk_norm": True, "logit_scale": 0.5},
    "cohere2": _WINDOWS | {"logit_scale": 0.5},
    "stablelm": _HALF | {"use_qkv_bias": True, "qk_layernorm": True},
    "starcoder2": {"use_bias": True, "sliding_window": 4},
    "nemotron": _HALF | {"hidden_act": "relu2"},
    "seed_oss": {"attention_bias": True},
    "ernie4_5": {"use_bias": True},
    "helium": {},
    "exaone4": _WINDOWS,
    "hunyuan_v1_dense": {},
    "arcee": {},
    "apertus": {},
}
