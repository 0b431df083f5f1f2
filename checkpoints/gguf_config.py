"""The model configuration that the metadata of a GGUF file means, in Hugging Face's words.

Keys as written by llama.cpp's converters for the architectures llama, qwen2 and qwen3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from halfbyte.checkpoints.gguf_header import GgufHeader, GgufTensor
from halfbyte.checkpoints.model_config import checked_config
from halfbyte.errors import CheckpointError

# Others store what transformers' models hold in ways of their own: norms plus one, heads in another order.
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_ROPE_FACTORS = "rope_freqs.weight"
# The converters write the factors of Llama 3's scaling and not its parameters; these are the published ones.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_SPECIAL = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "padding_token_id",
}
_COMPARED = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "attention_bias",
)


def gguf_config(header: GgufHeader, where: str, read: Callable[[GgufTensor], torch.Tensor]) -> dict[str, Any]:
    """A `checked_config` from the metadata, with sizes of tensors where the metadata has none.

    Args:
        header: of the file.
        where: its name, for errors.
        read: gives a tensor as float values; used for ``rope_freqs.weight`` alone.

    Raises:
        CheckpointError: an unsupported architecture or rotary scaling, a key that is missing or impossible.
    """
    metadata, tensors = header.metadata, header.tensors
    name = metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise CheckpointError(
            "this model architecture is not supported",
            where=where,
            found=f"general.architecture {name!r}"[:200],
            accepted=", ".join(_ARCHITECTURES),
        )
    _refuse_parts(metadata, name, where)
    get = _Getter(metadata, name, where)
    hidden, heads = get.integer("embedding_length"), get.integer("attention.head_count")
    head_dim = get.integer("attention.key_length", hidden // heads)
    config = {
        "model_type": name,
        "hidden_size": hidden,
        "intermediate_size": get.integer("feed_forward_length"),
        "num_hidden_layers": get.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": _vocabulary(tensors, where),
        "max_position_embeddings": get.integer("context_length", 2048),
        "rms_norm_eps": get.real("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(get, head_dim, tensors, read),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if name == "llama":
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    if name in ("llama", "qwen3"):
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    for key, stored in _SPECIAL.items():
        token = metadata.get(f"tokenizer.ggml.{stored}")
        # Left to the class, an absent token would become another model's.
        config[key] = token if type(token) is int else None
    return checked_config(config, where)


def differences(config: Mapping[str, Any], beside: Mapping[str, Any]) -> list[str]:
    """What config.json beside a file says otherwise, one text per key; a key it lacks is no difference."""
    other = dict(beside)
    if "rope_parameters" not in other and "rope_theta" in other:
        other["rope_parameters"] = {
            **(other.get("rope_scaling") or {"rope_type": "default"}),
            "rope_theta": other["rope_theta"],
        }
    return [
        f"{key} is {config[key]!r} in the file and {other[key]!r} in config.json"[:300]
        for key in _COMPARED
        if key in config and other.get(key) is not None and not _same(config[key], other[key])
    ]


class _Getter:
    """Reads keys of one architecture, with checks."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str, where: str) -> None:
        self.metadata, self.architecture, self.where = metadata, architecture, where

    def raw(self, key: str) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.raw(key)
        if isinstance(value, list) and value and len(set(map(str, value))) == 1:
            value = value[0]  # one entry per block, all equal
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value < 2**31:
            raise self.bad(key, "a positive integer")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.raw(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.bad(key, "a positive number")
        # Stored as float32: 1e-5 is meant where 9.999999747378752e-06 is read.
        return float(str(np.float32(value)))

    def bad(self, key: str, accepted: str) -> CheckpointError:
        return CheckpointError(
            f"{self.architecture}.{key} is missing or impossible",
            where=self.where,
            found=repr(self.raw(key))[:100],
            accepted=accepted,
        )


def _refuse_parts(metadata: Mapping[str, Any], name: str, where: str) -> None:
    for key, meaning in (
        ("split.count", "one part of several files"),
        (f"{name}.expert_count", "a mixture of experts"),
    ):
        value = metadata.get(key, 0)
        if value not in (0, 1):
            raise CheckpointError(
                f"{meaning} is not supported by this version", where=where, found=f"{key} = {value!r}"[:100]
            )


def _vocabulary(tensors: Mapping[str, GgufTensor], where: str) -> int:
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError("the tensor token_embd.weight is missing", where=where)
    return embedding.shape[0]


def _rope(
    get: _Getter, head_dim: int, tensors: Mapping[str, GgufTensor], read: Callable[[GgufTensor], torch.Tensor]
) -> dict[str, Any]:
    theta = get.real("rope.freq_base", 10000.0)
    rotated = get.integer("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise get.bad("rope.dimension_count", f"{head_dim}, the size of a head")
    scaling = get.raw("rope.scaling.type")
    if _ROPE_FACTORS in tensors:
        return _llama3(read(tensors[_ROPE_FACTORS]).flatten(), theta, head_dim, get)
    if scaling in (None, "none"):
        return {"rope_type": "default", "rope_theta": theta}
    if scaling == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": get.real("rope.scaling.factor")}
    raise get.bad("rope.scaling.type", "none or linear")


def _llama3(factors: torch.Tensor, theta: float, head_dim: int, get: _Getter) -> dict[str, Any]:
    """Llama 3's rotary scaling, found again from the divisor of each frequency."""
    if factors.shape == (head_dim // 2,) and torch.isfinite(factors).all():
        if bool((factors == 1).all()):
            return {"rope_type": "default", "rope_theta": theta}
        factor = float(factors.max())
        if torch.allclose(factors.double(), _llama3_factors(theta, head_dim, factor), rtol=1e-3):
            return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **_LLAMA3}
    raise CheckpointError(
        "its rotary frequencies are scaled in a way this version does not know",
        where=f"{get.where}, tensor {_ROPE_FACTORS}",
        found=f"{len(factors)} factors up to {float(factors.max()):g}" if len(factors) else "none",
        accepted=f"the factors of Llama 3 ({_LLAMA3})",
        advice="use the safetensors checkpoint it was made from",
    )


def _llama3_factors(theta: float, head_dim: int, factor: float) -> torch.Tensor:
    low, high, length = (
        _LLAMA3["low_freq_factor"],
        _LLAMA3["high_freq_factor"],
        _LLAMA3["original_max_position_embeddings"],
    )
    frequency = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    wavelength = 2 * math.pi / frequency
    smooth = (length / wavelength - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    ends = torch.where(
        wavelength < length / high, torch.ones_like(wavelength), torch.full_like(wavelength, factor)
    )
    return torch.where((wavelength >= length / high) & (wavelength <= length / low), between, ends)


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return all(_same(value, theirs[key]) for key, value in ours.items() if key in theirs)
    if isinstance(ours, float) and type(theirs) in (int, float):
        return math.isclose(ours, theirs, rel_tol=1e-6)
    return bool(ours == theirs)
