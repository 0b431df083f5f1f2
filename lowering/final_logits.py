"""From a model's last hidden state to its logits, as its family has it."""

from __future__ import annotations

from typing import Any

import torch


def final_logits(parts: Any, hidden: torch.Tensor) -> torch.Tensor:
    """float32 logits of the only sequence, [T, vocabulary] or [vocabulary].

    What transformers' models of these families do behind the head: Granite divides by ``logits_scaling``, Cohere
    multiplies by ``logit_scale``, Gemma bends all values below ``final_logit_softcapping`` by a tanh.

    Args:
        parts: holds the model's ``config`` and ``lm_head``.
        hidden: [1, T, H] or [1, H].
    """
    logits = parts.lm_head(hidden)
    divisor, factor, cap = (
        getattr(parts.config, name, None)
        for name in ("logits_scaling", "logit_scale", "final_logit_softcapping")
    )
    if divisor is not None:
        logits = logits / divisor
    if factor is not None:
        logits = logits * factor
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits[0].float()
