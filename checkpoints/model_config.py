"""The supported families of models, and the check of a configuration before anything is made of it."""

from __future__ import annotations

from typing import Any

from halfbyte.checkpoints.text_part import TEXT_OF, completed, family_of, text_part
from halfbyte.errors import CheckpointError

SUPPORTED = (
    "llama",
    "llama4_text",
    "mistral",
    "ministral",
    "qwen2",
    "qwen3",
    "phi",
    "phi3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "olmo",
    "olmo2",
    "olmo3",
    "smollm3",
    "glm",
    "glm4",
    "granite",
    "cohere",
    "cohere2",
    "stablelm",
    "starcoder2",
    "nemotron",
    "seed_oss",
    "ernie4_5",
    "helium",
    "exaone4",
    "hunyuan_v1_dense",
    "arcee",
    "apertus",
    "internlm3",
    "ministral3",
    "jais2",
    "iquestcoder",
    "nanochat",
    "vaultgemma",
    "granite_swa",
    "youtu",
    "minicpm3",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "granitemoe",
    "granitemoeshared",
    "ernie4_5_moe",
    "minimax_m2",
    "glm4_moe",
    "glm4_moe_lite",
    "dots1",
    "exaone_moe",
    "flex_olmo",
    "cohere2_moe",
    "afmoe",
    "solar_open",
    "mellum",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
)

# With latent attention.
LATENT = ("deepseek_v2", "deepseek_v3")
# Models by other names.
_ALSO = {"kimi_k2": "deepseek_v3"}
# The largest values that are still a model; beyond them a damaged configuration takes all memory or time.
_LIMITS = {
    "hidden_size": 2**17,
    "intermediate_size": 2**20,
    "intermediate_size_mlp": 2**20,
    "num_hidden_layers": 1024,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**13,
    "vocab_size": 2**24,
    "max_position_embeddings": 2**30,
}
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # the others change with the length of the text
_OPTIONAL = ("num_key_value_heads", "head_dim", "max_position_embeddings", "intermediate_size_mlp")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_MOST_EXPERTS = 2**17  # in all layers: each has names of its own
# What has no meaning here, or would make transformers look for code to run.
_DROPPED = (
    "quantization_config",
    "compression_config",
    "auto_map",
    "_name_or_path",
    "_attn_implementation",
    "_attn_implementation_internal",
    "_experts_implementation",
    "attn_implementation",
    "experts_implementation",
    "transformers_version",
    "torch_dtype",
)


def checked_config(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """The configuration without quantization and without anything that leads to foreign code.

    Args:
        raw: config.json as read.
        where: its name, for errors.

    Raises:
        CheckpointError: an unsupported ``model_type``, or a size that is missing, no integer or absurd.
    """
    kind = raw.get("model_type")
    if isinstance(kind, str) and kind in TEXT_OF:
        part = _plain(text_part(raw, where))
        _check_family(family_of(part), where)
        _check_sizes(part, where, optional=tuple(_LIMITS))  # before transformers makes lists of their lengths
        config = completed(part, where)
    else:
        config = _plain(raw)
        _check_family(config.get("model_type"), where)
    _check_sizes(config, where, _OPTIONAL)
    _check_heads(config, where)
    _check_rope(config, where)
    _check_causal(config, where)
    _check_experts(config, where)
    dtype = config.get("dtype")
    if dtype is not None and dtype not in ("float32", "float16", "bfloat16"):
        raise CheckpointError(
            "dtype is unknown", where=where, found=repr(dtype)[:100], accepted="float32, float16, bfloat16"
        )
    return config


def _plain(raw: dict[str, Any]) -> dict[str, Any]:
    config = {key: value for key, value in raw.items() if key not in _DROPPED}
    if "torch_dtype" in raw:
        config.setdefault("dtype", raw["torch_dtype"])
    kind = config.get("model_type")
    return config | {"model_type": _ALSO[kind]} if isinstance(kind, str) and kind in _ALSO else config


def _check_family(model_type: Any, where: str) -> None:
    if model_type not in SUPPORTED:
        raise CheckpointError(
            "this model architecture is not supported",
            where=where,
            found=f"model_type {model_type!r}"[:200],
            accepted=", ".join((*SUPPORTED, *_ALSO, *TEXT_OF)),
        )


def _check_sizes(config: dict[str, Any], where: str, optional: tuple[str, ...]) -> None:
    for key, largest in _LIMITS.items():
        value = config.get(key)
        if value is None and key in optional:
            continue
        if type(value) is not int or not 1 <= value <= largest:
            raise CheckpointError(
                f"{key} is missing or impossible",
                where=where,
                found=repr(value)[:100],
                accepted=f"an integer from 1 to {largest}",
            )


def _check_heads(config: dict[str, Any], where: str) -> None:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    kv_heads, head_dim = config.get("num_key_value_heads"), config.get("head_dim")
    latent = config.get("qk_rope_head_dim")  # of latent attention, whose heads are no part of the hidden size
    if type(latent) is int:
        head_dim = latent
    found = f"hidden_size {hidden}, {heads} heads of {head_dim}, {kv_heads} key-value heads"
    if (head_dim is None and hidden % heads) or heads % (kv_heads or 1) or (head_dim or hidden // heads) % 2:
        raise CheckpointError(
            "the attention heads do not fit each other",
            where=where,
            found=found,
            accepted="heads of an even size, a whole number of them for each key-value head",
        )


def _check_rope(config: dict[str, Any], where: str) -> None:
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key)
        if not isinstance(rope, dict):
            continue
        # One of all layers, or one of each kind of layer by its name (Gemma 3).
        for kind in (rope, *(inner for inner in rope.values() if isinstance(inner, dict))):
            found = kind.get("rope_type", kind.get("type", "default"))
            if found not in _ROPE_TYPES:
                raise CheckpointError(
                    "this kind of rotary scaling is not supported",
                    where=f"{where}, {key}",
                    found=repr(found)[:100],
                    accepted=", ".join(_ROPE_TYPES),
                )


def _check_causal(config: dict[str, Any], where: str) -> None:
    """Embedding models are made of decoders that look ahead, which no decoder here does."""
    for key, usual in (("is_causal", True), ("use_bidirectional_attention", False)):
        value = config.get(key)
        if value is not None and value is not usual:
            raise CheckpointError(
                "attention to later tokens is not supported",
                where=f"{where}, {key}",
                found=repr(value)[:100],
                accepted=f"{usual}, or nothing",
            )


def _check_experts(config: dict[str, Any], where: str) -> None:
    for key in _EXPERTS:
        experts = config.get(key, 1)
        if type(experts) is not int or not 1 <= experts * config["num_hidden_layers"] <= _MOST_EXPERTS:
            raise CheckpointError(
                f"{key} is impossible",
                where=where,
                found=repr(experts)[:100],
                accepted=f"an integer, at most {_MOST_EXPERTS} experts in all layers",
            )
        chosen = config.get("num_experts_per_tok", 1)
        if key in config and not (type(chosen) is int and 1 <= chosen <= experts):
            raise CheckpointError(
                "num_experts_per_tok is impossible",
                where=where,
                found=f"{chosen!r:.100} of {experts} experts",
                accepted=f"an integer from 1 to {experts}",
            )
