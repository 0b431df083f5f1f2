"""The layers and parameters of a model from its configuration, in an instant where the family is a plain one.

transformers takes seconds to import and to build a large model, which is too long to look at headers. So the names
and shapes of dense Llama, Qwen2 and Qwen3 models are written down here, for configurations that leave nothing
about them to defaults; any other is built. A test compares the two ways.
"""

from __future__ import annotations

from typing import Any

from halfbyte.checkpoints.architecture import Architecture, LinearShape, built_architecture

_FAMILIES = ("llama", "qwen2", "qwen3")
_STATED = ("num_key_value_heads", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
# Rotary embeddings by kind, and the numbers that each needs.
_ROTARY = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def architecture_of(config: dict[str, Any]) -> Architecture:
    """The layers and parameters of the model that a `checked_config` leads to, in model order.

    Raises:
        CheckpointError: see `meta_model`.
    """
    return _dense(config) if _is_plain(config) else built_architecture(config)


def _is_plain(config: dict[str, Any]) -> bool:
    """Whether nothing that shapes the model depends on defaults, and nothing is left for transformers to refuse."""
    kind = config["model_type"]
    stated = all(config.get(key) is not None for key in _STATED)
    flags = (config.get(key, False) for key in ("tie_word_embeddings", "attention_bias", "mlp_bias"))
    size = config.get("head_dim") is not None or kind in ("llama", "qwen2")
    usual = config.get("hidden_act", "silu") == "silu" and config.get("pretraining_tp", 1) == 1
    return (
        kind in _FAMILIES
        and (stated and size and usual)
        and all(type(flag) is bool for flag in flags)
        and _is_number(config.get("rms_norm_eps", 1e-6))
        and all(_is_rotary(config[key]) for key in ("rope_parameters", "rope_scaling") if key in config)
    )


def _is_rotary(rope: Any) -> bool:
    if rope is None:
        return True
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else None
    needed = _ROTARY.get(kind) if isinstance(kind, str) else None
    return needed is not None and all(_is_number(rope.get(key)) for key in needed)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and value > 0


def _dense(config: dict[str, Any]) -> Architecture:
    hidden, wide, vocabulary = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, kind = config["num_attention_heads"], config["model_type"]
    size = config.get("head_dim") or hidden // heads
    inner, shared = heads * size, config["num_key_value_heads"] * size
    biased = config.get("attention_bias", False) and kind != "qwen2"
    wide_bias = config.get("mlp_bias", False) and kind == "llama"
    linears: dict[str, LinearShape] = {}
    parameters: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}

    def linear(name: str, outputs: int, inputs: int, bias: bool) -> None:
        linears[name] = LinearShape((outputs, inputs), bias)
        parameters[f"{name}.weight"] = (outputs, inputs)
        if bias:
            parameters[f"{name}.bias"] = (outputs,)

    for number in range(config["num_hidden_layers"]):
        block = f"model.layers.{number}"
        for leaf, outputs in (("q", inner), ("k", shared), ("v", shared)):
            linear(f"{block}.self_attn.{leaf}_proj", outputs, hidden, biased or kind == "qwen2")
        linear(f"{block}.self_attn.o_proj", hidden, inner, biased)
        if kind == "qwen3":
            parameters |= {f"{block}.self_attn.{leaf}_norm.weight": (size,) for leaf in "qk"}
        linear(f"{block}.mlp.gate_proj", wide, hidden, wide_bias)
        linear(f"{block}.mlp.up_proj", wide, hidden, wide_bias)
        linear(f"{block}.mlp.down_proj", hidden, wide, wide_bias)
        parameters[f"{block}.input_layernorm.weight"] = (hidden,)
        parameters[f"{block}.post_attention_layernorm.weight"] = (hidden,)
    parameters["model.norm.weight"] = (hidden,)
    linear("lm_head", vocabulary, hidden, bias=False)
    return Architecture(linears, parameters, config.get("tie_word_embeddings", False))
