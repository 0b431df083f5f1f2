"""The supported model architectures: a checked configuration, and what modules and parameters it leads to.

A reader takes the names and shapes of layers from here, never from the tensors, so that a tensor of a wrong
shape is found. The model is transformers' own, on the meta device: no weight is allocated, and code that
comes with a checkpoint is never run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from halfbyte.checkpoints.experts import ExpertsShape, router_shape
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
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "granitemoe",
    "granitemoeshared",
    "ernie4_5_moe",
    "minimax_m2",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
)

# With latent attention.
LATENT = ("deepseek_v2", "deepseek_v3")
# Models of text and images of which the text part is compiled: its configuration is within theirs. What it may lack.
_WITH_TEXT = ("llama4",)
_SHARED = ("dtype", "torch_dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id")
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
_EAGER = ("gpt_oss", "gemma2")  # attention that torch's own does not compute: with sinks or bent scores
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


@dataclass(frozen=True)
class LinearShape:
    """An nn.Linear of the model: logical (N, K) and whether it has a bias."""

    shape: tuple[int, int]
    bias: bool


@dataclass(frozen=True)
class Architecture:
    """What a configuration leads to.

    Attributes:
        linears: every nn.Linear by module path, in model order, lm_head included; routers, and the linears of
            every expert.
        parameters: shape of every parameter by name, a tied ``lm_head.weight`` included.
        tied: lm_head shares the weight of the embedding.
        buffers: names of stored tensors that are no parameters, such as the bias of a router.
        experts: modules of stacked experts, by path.
    """

    linears: dict[str, LinearShape]
    parameters: dict[str, tuple[int, ...]]
    tied: bool
    buffers: frozenset[str] = frozenset()
    experts: dict[str, ExpertsShape] = field(default_factory=dict)

    def renamed(self, rename: Callable[[str], str]) -> Architecture:
        """The same with other names for layers, parameters and buffers."""
        return Architecture(
            {rename(name): linear for name, linear in self.linears.items()},
            {rename(name): shape for name, shape in self.parameters.items()},
            self.tied,
            frozenset(map(rename, self.buffers)),
            {rename(path): shape for path, shape in self.experts.items()},
        )


def checked_config(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """The configuration without quantization and without anything that leads to foreign code.

    Args:
        raw: config.json as read.
        where: its name, for errors.

    Raises:
        CheckpointError: an unsupported ``model_type``, or a size that is missing, no integer or absurd.
    """
    if raw.get("model_type") in _WITH_TEXT and isinstance(raw.get("text_config"), dict):
        raw = {key: raw[key] for key in _SHARED if key in raw} | raw["text_config"]
    model_type = raw.get("model_type")
    if model_type not in SUPPORTED:
        raise CheckpointError(
            "this model architecture is not supported",
            where=where,
            found=f"model_type {model_type!r}"[:200],
            accepted=", ".join(SUPPORTED),
        )
    config = {key: value for key, value in raw.items() if key not in _DROPPED}
    if "torch_dtype" in raw:
        config.setdefault("dtype", raw["torch_dtype"])
    for key, largest in _LIMITS.items():
        value = config.get(key)
        if value is None and key in _OPTIONAL:
            continue
        if type(value) is not int or not 1 <= value <= largest:
            raise CheckpointError(
                f"{key} is missing or impossible",
                where=where,
                found=repr(value)[:100],
                accepted=f"an integer from 1 to {largest}",
            )
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


def _check_heads(config: dict[str, Any], where: str) -> None:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    kv_heads, head_dim = config.get("num_key_value_heads"), config.get("head_dim")
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


def experts_per_token(config: dict[str, Any]) -> int:
    """How many routed experts of a block each token is sent to, in a model that has some."""
    from transformers import AutoConfig

    return int(AutoConfig.for_model(**config).num_experts_per_tok)


def meta_model(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """transformers' causal language model for a `checked_config`, on the meta device, in eval mode.

    Raises:
        CheckpointError: when transformers cannot make a model of it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    # Whatever transformers does with an impossible value (KeyError, ZeroDivisionError, its own validation
    # errors), the cause is the configuration.
    try:
        made = AutoConfig.for_model(**config)
        attention = "eager" if config["model_type"] in _EAGER else "sdpa"
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                made, attn_implementation=attention, dtype=dtype, trust_remote_code=False
            )
    except Exception as error:
        raise CheckpointError(
            "transformers cannot make a model of this configuration",
            where="config.json",
            found=f"{type(error).__name__}: {error}"[:500],
        ) from error
    return model.eval()


def built_architecture(config: dict[str, Any]) -> Architecture:
    """The layers and parameters of the model that transformers builds for a `checked_config`.

    Raises:
        CheckpointError: see `meta_model`.
    """
    model = meta_model(config)
    linears: dict[str, LinearShape] = {}
    stacks: dict[str, ExpertsShape] = {}
    parameters = {name: tuple(value.shape) for name, value in model.named_parameters(remove_duplicate=False)}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            linears[path] = LinearShape((module.out_features, module.in_features), module.bias is not None)
        elif (router := router_shape(module)) is not None:
            linears[path] = LinearShape(router, getattr(module, "bias", None) is not None)
        elif (experts := ExpertsShape.of(module)) is not None:
            stacks[path] = experts
            for leaf, _ in module.named_parameters(recurse=False):
                del parameters[f"{path}.{leaf}"]
            for name, shape in experts.linears(path):
                linears[name], parameters[f"{name}.weight"] = LinearShape(shape, experts.bias), shape
                if experts.bias:
                    parameters[f"{name}.bias"] = shape[:1]
    kept = model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys()
    return Architecture(linears, parameters, bool(model.config.tie_word_embeddings), frozenset(kept), stacks)
