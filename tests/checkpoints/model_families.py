"""Families of models, each with what sets it apart: configurations beside made_experts.BASE."""

from __future__ import annotations

from typing import Any

_WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_HALF = {"partial_rotary_factor": 0.5}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_TWO_ROPES = {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE | {"rope_theta": 1e3}}}
_LATENT = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 2.0,
    "original_max_position_embeddings": 4,  # fewer than the tests have tokens
    "llama_4_scaling_beta": 0.1,
}

DENSE: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "mistral windowed": {"sliding_window": 4},
    "ministral": _WINDOWS,
    "qwen2 windowed": _WINDOWS | {"use_sliding_window": True},
    "phi": _HALF,
    "phi3": {"sliding_window": None, "pad_token_id": 0},
    "gemma": {"hidden_activation": "gelu_pytorch_tanh"},
    "gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0},
    "gemma3_text": _WINDOWS | {"query_pre_attn_scalar": 24, "final_logit_softcapping": 3.0} | _TWO_ROPES,
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
    "internlm3": {},
    "ministral3": {"rope_parameters": _YARN},
    "jais2": {},
    "iquestcoder": {},
    "nanochat": {},
    "vaultgemma": _WINDOWS
    | {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "granite_swa": _WINDOWS,
    "youtu": _LATENT,
    "minicpm3": _LATENT | {"dim_model_base": 32, "scale_emb": 2.0},
}

_SIX = {"num_experts": 6, "moe_intermediate_size": 40}
_SIX_ROUTED = {"n_routed_experts": 6, "n_shared_experts": 1, "moe_intermediate_size": 40}
_KINDS = {"mlp_layer_types": ["dense", "sparse"]}
# With experts, in blocks of a form that one of made_experts.FAMILIES has.
SPARSE: dict[str, dict[str, Any]] = {
    "glm4_moe_lite": _LATENT | _SIX_ROUTED | _KINDS,
    "dots1": _SIX_ROUTED | {"first_k_dense_replace": 1, "n_group": 3, "topk_group": 2},
    "exaone_moe": _SIX | _WINDOWS | _KINDS,
    "flex_olmo": _SIX | {"pad_token_id": 0},
    "cohere2_moe": _SIX | _WINDOWS,
    "afmoe": _SIX | _WINDOWS | {"num_dense_layers": 1},
    "solar_open": _SIX_ROUTED | {"partial_rotary_factor": 1.0},
    "mellum": _SIX | _WINDOWS | _TWO_ROPES,
}
