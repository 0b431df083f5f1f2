"""Attention over plain arrays in float64, written from the definition: no code of the product's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Rule:
    """scale of the scores, positions a token sees (0: all), bound of the scores (0: none), positions of a chunk."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    chunk: int = 0


def attention(q: Array, k: Array, v: Array, position: int, rule: Rule, sinks: Array | None = None) -> Array:
    """[T, Hq, Dv] for q [T, Hq, D] and the k [S, Hkv, D], v [S, Hkv, Dv] of all positions so far."""
    tokens, heads, _ = q.shape
    group = heads // k.shape[1]
    out = np.zeros((tokens, heads, v.shape[2]))
    for t in range(tokens):
        last = position + t
        first = max(0, last - rule.window + 1) if rule.window else 0
        first = last // rule.chunk * rule.chunk if rule.chunk else first
        for h in range(heads):
            scores = k[first : last + 1, h // group].astype(np.float64) @ q[t, h].astype(np.float64)
            scores *= rule.scale
            if rule.softcap:
                scores = rule.softcap * np.tanh(scores / rule.softcap)
            powers = np.exp(scores - scores.max())
            total = powers.sum() + (0 if sinks is None else np.exp(float(sinks[h]) - scores.max()))
            out[t, h] = powers / total @ v[first : last + 1, h // group].astype(np.float64)
    return out


def rotated(x: Array, angles: Array, interleaved: bool) -> Array:
    """float64 [T, heads, D] whose first 2 R columns are turned by the angles [T, R], as complex numbers."""
    pairs = angles.shape[1]
    out = x.astype(np.float64)
    a, b = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
        if interleaved
        else (slice(pairs), slice(pairs, 2 * pairs))
    )
    turned = (out[..., a] + 1j * out[..., b]) * np.exp(1j * angles)[:, None]
    out[..., a], out[..., b] = turned.real, turned.imag
    return out
