"""The text model within a model of text and images: what of the whole configuration is its own."""

from __future__ import annotations

import copy
from typing import Any

from halfbyte.errors import CheckpointError

# What the text part of each is, if it does not say.
TEXT_OF = {
    "gemma3": "gemma3_text",
    "kimi_k25": "deepseek_v3",
    "llama4": "llama4_text",
    "mistral3": "mistral",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
}
# Whose positions have an axis for time, height and width each. Those of text are alike, which leaves another model.
_WITH_AXES = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
_AXES = ("mrope_section", "mrope_interleaved")
_SHARED = ("dtype", "torch_dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")


def text_part(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """The configuration of the text model, as it stands in that of a whole one of `TEXT_OF`.

    Raises:
        CheckpointError: there is none.
    """
    kind = raw["model_type"]
    inner = raw.get("text_config")
    if inner is None and "hidden_size" in raw:  # the older ones are flat
        inner = raw
    if not isinstance(inner, dict):
        raise CheckpointError(
            "text_config is missing or impossible",
            where=where,
            found=f"{inner!r:.100} beside model_type {kind!r}",
            accepted="the configuration of the text model",
            advice="config.json is damaged or of another model: fetch it anew",
        )
    own = inner.get("model_type", kind)
    own = TEXT_OF[kind] if own == kind else own
    return {key: raw[key] for key in _SHARED if key in raw} | inner | {"model_type": own}


def family_of(part: dict[str, Any]) -> Any:
    """The ``model_type`` of the model of text alone that a `text_part` leads to."""
    own = part["model_type"]
    return _WITH_AXES.get(own, own) if isinstance(own, str) else own


def completed(part: dict[str, Any], where: str) -> dict[str, Any]:
    """A `text_part` with all that transformers takes where it is silent, for a model of text alone.

    Published configurations of Gemma 3 leave out the number of heads and the vocabulary.

    Args:
        part: of a known ``model_type``, with nothing that leads to foreign code, and with sizes within limits.
        where: its name, for errors.

    Raises:
        CheckpointError: transformers cannot read it.
    """
    from transformers import AutoConfig

    try:
        whole = AutoConfig.for_model(**copy.deepcopy(part)).to_dict()
    except Exception as error:  # whatever it does with an impossible value
        raise CheckpointError(
            "transformers cannot read this configuration",
            where=f"{where}, text_config",
            found=f"{type(error).__name__}: {error}"[:500],
            accepted=f"what a {part['model_type']} has",
            advice="config.json is damaged, or made for another version of transformers: fetch it anew",
        ) from error
    ropes = {key: _without_axes(whole[key]) for key in ("rope_parameters", "rope_scaling") if key in whole}
    # Not all of these are attributes of a text model's class.
    shared = {key: part[key] for key in _SHARED if key in part}
    return whole | shared | ropes | {"model_type": family_of(part)}


def _without_axes(rope: Any) -> Any:
    if not isinstance(rope, dict):
        return rope
    kept = {key: value for key, value in rope.items() if key not in _AXES}
    for key in ("rope_type", "type"):
        if kept.get(key) == "mrope":
            kept[key] = "default"
    return kept
