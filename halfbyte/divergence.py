"""How far a model's next tokens are from another's."""

from __future__ import annotations

from typing import Any

import numpy as np


def divergence(expected: np.ndarray[Any, Any], got: np.ndarray[Any, Any]) -> float:
    """Kullback-Leibler divergence of ``got`` from ``expected``, logits [T, V]: the mean of the rows, in nats."""
    p, q = _log_softmax(expected), _log_softmax(got)
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def _log_softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(-1, keepdims=True)))
